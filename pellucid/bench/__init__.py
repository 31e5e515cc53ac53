"""The ground-truth benchmark: methods of the lab on models whose mechanism is known."""
