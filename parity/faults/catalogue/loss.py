"""Bugs of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from megalodon_jax import loss
from parity.faults.fault import (
    Family,
    Fault,
    Patch,
    Plant,
    on_result,
    rounded,
    uncached,
)
from parity.megalodon.cases import Case


def _loss(
    name: str,
    how: str,
    attribute: str,
    plant: Plant,
    witness: str = "length_c",
    shows: Callable[[Case], bool] = uncached,
) -> Fault:
    return Fault(Family.LOSS, name, how, "loss", Patch(loss, attribute, plant), witness, shows)


def _count_all(result, logits, labels, *rest):
    total, _ = result
    return total, jnp.asarray(labels[:, 1:].size, jnp.int32)


def _as_class_zero(targets):
    def faulty(labels, mask, V, ignore_index):
        return targets(jnp.where(labels == ignore_index, 0, labels), None, V, ignore_index)

    return faulty


def _labels(change: Callable[[Any, int], Any]) -> Plant:
    def plant(targets):
        def faulty(labels, mask, V, ignore_index):
            return targets(change(labels, ignore_index), mask, V, ignore_index)

        return faulty

    return plant


def _shifted_twice(labels, ignore_index):
    return jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=ignore_index)


def _not_shifted(labels, ignore_index):
    return jnp.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=ignore_index)


def _mean_of_means(sums):
    def faulty(logits, labels, mask=None, **options):
        rows = []
        for row in range(logits.shape[0]):
            one = slice(row, row + 1)
            total, count = sums(
                logits[one], labels[one], None if mask is None else mask[one], **options
            )
            rows.append(total / jnp.maximum(count, 1).astype(total.dtype))
        return jnp.mean(jnp.stack(rows)), jnp.asarray(1, jnp.int32)

    return faulty


def _sum(mean):
    def faulty(total, count, dtype):
        return total.astype(dtype)

    return faulty


def _smoothed(total, logits, targets, valid, dtype):
    uniform = jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1)
    return 0.9 * total + 0.1 * jnp.sum(jnp.where(valid, uniform, 0.0))


def _from_bfloat16(summed):
    def faulty(logits, targets, valid, dtype):
        return summed(rounded(logits), targets, valid, dtype)

    return faulty


def _unmasked(targets):
    def faulty(labels, mask, V, ignore_index):
        return targets(labels, None, V, ignore_index)

    return faulty


def _padded_rows_differ(case: Case) -> bool:
    return case.padding != "none"


FAULTS = (
    _loss(
        "loss_counts_ignored",
        "the mean divides by all positions",
        "loss_sum_and_count",
        on_result(_count_all),
    ),
    _loss("loss_ignored_is_class_zero", "-100 clipped to 0 and scored", "_targets", _as_class_zero),
    _loss(
        "loss_shifted_twice",
        "labels shifted by the data loader and by the loss",
        "_targets",
        _labels(_shifted_twice),
    ),
    _loss("loss_not_shifted", "a token predicts itself", "_targets", _labels(_not_shifted)),
    _loss(
        "loss_mean_of_means",
        "the mean over rows of means over positions",
        "loss_sum_and_count",
        _mean_of_means,
        "right_padding",
        _padded_rows_differ,
    ),
    _loss(
        "loss_ignores_mask",
        "padding scored wherever the labels do not say -100",
        "_targets",
        _unmasked,
        "labels_at_padding",
        lambda case: case.labels_at_padding,
    ),
    _loss("loss_summed", "reduction='sum'", "_mean", _sum),
    _loss(
        "loss_in_bits",
        "logarithm to base 2",
        "_mean",
        on_result(lambda value, *args: value / math.log(2)),
    ),
    _loss("loss_label_smoothing", "smoothing of 0.1 left on", "_summed", on_result(_smoothed)),
    _loss(
        "loss_of_bfloat16_logits", "logits rounded before the softmax", "_summed", _from_bfloat16
    ),
)
