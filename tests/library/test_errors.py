"""Errors in one line: their codes, and the table of their words."""

import pickle
import re

import errors
import pytest
from torch._utils import ExceptionWrapper

from ddpkit.errors import UserError
from ddpkit.run.checkpoint import Damaged


def test_the_table() -> None:
    """docs/errors.md has the words of all errors, of each the code; this is where they change."""
    update = f"python {errors.__file__}"
    assert errors.PAGE.read_text() == errors.page(), f"to write the page anew: {update}"


def test_the_form_of_lines() -> None:
    for file, code, text in errors.raised():
        assert "\n" not in text and not text.endswith("."), (file, code, text)
        assert not re.search(r"\b(please|sorry|invalid|illegal)\b", text, re.I), (file, code, text)


def find() -> UserError:
    return UserError("a.jpg: cannot be read")


def test_a_code() -> None:
    """The function that raises it; it stays when the error comes from another process."""
    error = find()
    assert str(error) == "a.jpg: cannot be read [test_errors.find]"
    assert error.line == "a.jpg: cannot be read"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(Damaged(f"Traceback\n  File ...\nddpkit.Damaged: {error}\n")) == str(error)
    try:
        raise error
    except UserError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(UserError) as caught:
        wrapped.reraise()
    assert str(caught.value) == str(error)
