"""Models and circuits of other libraries, read into Pellucid's and written back."""
