"""Whether two tokenizers give the same ids to the same texts, as far as their tokens decide it."""

from rollout_engine.text.tokenizer import TextCodec


def tokenizer_difference(ours: TextCodec, theirs: TextCodec) -> str:
    """The first difference between the vocabularies or special tokens of two tokenizers, as a phrase; "": none.

    The rules by which texts are cut into tokens are not compared: the tokens of a rollout have been cut already.
    """
    own, other = ours.hf.get_vocab(), theirs.hf.get_vocab()
    if own != other:
        if len(own) != len(other):
            return f"{len(own)} tokens here and {len(other)} there"
        by_id = {token_id: token for token, token_id in other.items()}
        token_id, token = min((i, t) for t, i in own.items() if other.get(t) != i)
        return f"id {token_id} is {token!r} here and {by_id.get(token_id)!r} there"
    own_added, other_added = _added_tokens_of(ours), _added_tokens_of(theirs)
    if own_added != other_added:
        token_id, how = min(own_added.items() ^ other_added.items())
        state = "special" if how[1] else "added"
        where = "here" if own_added.get(token_id) == how else "there"
        return f"id {token_id} ({how[0]!r}) is {state} {where} alone"
    return ""


def _added_tokens_of(codec: TextCodec) -> dict[int, tuple[str, bool]]:
    """Id of each added token -> its text, and whether it is special."""
    return {token_id: (token.content, token.special) for token_id, token in codec.hf.added_tokens_decoder.items()}
