"""A byte-level BPE tokenizer for code, whose tokens never straddle the places where the tasks ask a question."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
N_BYTES = 256

# Merges stay inside a piece. Brackets and quotes group in the listed pairs only, and never with a line break:
# `")`, `]]` and a final `:` are then always followed by a token boundary.
PIECES = (
    r"\n+[ \t]*",  # line breaks with the indentation of the next line
    r" ?_*\p{L}+",  # a word, or a part of a snake_case name
    r" ?\p{N}",  # digits singly
    r" ?_+",
    r" ?(?:\"{3}|'{3})",
    r"[\"'][)\]},:]",  # a string ends: `")` `"]` `":`
    r" ?[(\[{]?[\"']",  # a string begins: `("` ` ["` ` '`
    r" ?(?:\[\[|\(\)|\[\]|\{\})|\]\]|[)\]}][,:]",
    r" ?[-+*/%&|^<>=!@~#]+",  # operators
    r" ?\.+",
    r" ?[^\s\p{L}\p{N}]",  # any other mark singly
    r"[^\S\n]+(?=[^\S\n])|\s",  # spaces; the last one goes with what follows
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 2048) -> Tokenizer:
    """A byte-level BPE tokenizer with at most `vocab_size` tokens trained on `texts`; `END_OF_TEXT` is token 0.

    Lossless on any text; `END_OF_TEXT` inside a text is ordinary characters. Raises ValueError below 257 tokens.
    """
    if vocab_size < N_BYTES + 1:
        raise ValueError(
            f"vocab_size {vocab_size} is too small: {N_BYTES} bytes and {END_OF_TEXT} need {N_BYTES + 1}"
        )
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex("|".join(PIECES)), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """The id of `END_OF_TEXT`; raises ValueError if the tokenizer has no such token."""
    token = tokenizer.token_to_id(END_OF_TEXT)
    if token is None:
        raise ValueError(f"the tokenizer has no {END_OF_TEXT!r} token, which separates documents")
    return token
