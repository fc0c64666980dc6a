"""Modules with names that say nothing are paired in the order in which they are used."""

from __future__ import annotations

from parity.engine.pairing.order_of_use import paired_in_order


def made_of(original: dict[str, tuple[int, ...]], port: dict[str, tuple[int, ...]]) -> dict:
    found = paired_in_order(original, port)
    assert all(c.shape == port[name] for name, c in found.items())
    return {name: c.parameters[0] for name, c in found.items()}


TORCH = {
    "0.weight": (8,), "0.bias": (8,), "1.weight": (8, 8), "1.bias": (8,),
    "3.weight": (8, 8), "3.bias": (8,),
}  # fmt: skip


def test_modules_are_paired_in_order_and_their_parameters_by_what_they_are() -> None:
    port = {
        "LayerNorm_0.bias": (8,), "LayerNorm_0.scale": (8,), "Dense_0.bias": (8,),
        "Dense_0.kernel": (8, 8), "Dense_1.bias": (8,), "Dense_1.kernel": (8, 8),
    }  # fmt: skip
    found = made_of(TORCH, port)
    assert found == {
        "LayerNorm_0.bias": "0.bias", "LayerNorm_0.scale": "0.weight", "Dense_0.bias": "1.bias",
        "Dense_0.kernel": "1.weight", "Dense_1.bias": "3.bias", "Dense_1.kernel": "3.weight",
    }  # fmt: skip
    # torch stores (out, in), Flax (in, out): also where both are equal.
    kernel = paired_in_order(TORCH, port)["Dense_0.kernel"].pieces[0].layout
    assert kernel.axes == (1, 0)


def test_a_module_that_fits_nowhere_is_left_out_and_the_others_keep_their_order() -> None:
    port = {"a.kernel": (8, 5), "b.kernel": (8, 8), "b.bias": (8,), "c.kernel": (8, 8),
            "c.bias": (8,)}  # fmt: skip
    assert made_of(TORCH, port) == {
        "b.kernel": "1.weight", "b.bias": "1.bias", "c.kernel": "3.weight", "c.bias": "3.bias",
    }  # fmt: skip


def test_modules_of_other_numbers_of_parameters_do_not_fit() -> None:
    assert made_of({"0.weight": (8, 8), "0.bias": (8,)}, {"a.kernel": (8, 8)}) == {}
    assert made_of({"0.weight": (8, 8)}, {"a.kernel": (8, 8), "a.bias": (8,)}) == {}
    assert made_of({"0.weight": (4, 8)}, {"a.kernel": (4, 9)}) == {}
    assert made_of({}, {"a.kernel": (4, 8)}) == {}


def test_as_many_modules_as_possible_are_paired() -> None:
    # The first fit of each would leave one pair: a with the second of two.
    original = {"x.w": (2,), "y.w": (3,), "z.w": (4,)}
    port = {"a.w": (4,), "b.w": (2,), "c.w": (3,)}
    assert made_of(original, port) == {"b.w": "x.w", "c.w": "y.w"}


def test_parameters_without_a_module_are_paired_one_by_one() -> None:
    assert made_of({"u": (2, 3), "v": (4,)}, {"p": (2, 3), "q": (4,)}) == {"p": "u", "q": "v"}
