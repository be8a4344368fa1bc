"""Sets of small integers as Python ints: bit i stands for the number i.

Union, intersection and difference of sets of thousands run at memory speed, which makes
reachability of a whole network a matter of milliseconds without any library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def bitset(numbers: Iterable[int]) -> int:
    """The set of these numbers."""
    members = 0
    for number in numbers:
        members |= 1 << number
    return members


def members(bits: int) -> Iterator[int]:
    """The numbers in the set, ascending."""
    # Text search is linear in the set's span, while clearing the lowest bit of a long int again and
    # again would be quadratic.
    digits = bin(bits)[:1:-1]
    position = digits.find("1")
    while position >= 0:
        yield position
        position = digits.find("1", position + 1)


def lowest(bits: int) -> int:
    """The smallest number in a set that is not empty."""
    return (bits & -bits).bit_length() - 1
