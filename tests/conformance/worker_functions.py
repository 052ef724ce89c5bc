"""Functions that scenarios give to `collective_rpc` in place of a method's name."""


def add(worker, a, b=0):
    return worker.rank + worker.vocab_size + a + b


def fail(worker):
    raise KeyError("of the function")


WRONG_CALLS = (
    (dict(method=fail), "fail failed on rank 0: KeyError: 'of the function'"),
    (dict(method=add), "add failed on rank 0: TypeError: .* missing 1 required positional argument"),
    (dict(method=add, args=3), "args must be a list"),
)
"""Arguments of `collective_rpc`, and the errors that they raise."""
