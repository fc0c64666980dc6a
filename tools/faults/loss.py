"""Planted bugs of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from megalodon_jax import loss
from parity.faults.fault import Family, Plant, around, fault, on_result, rounded

_loss = partial(fault, Family.LOSS, stage="loss", owner=loss)


def _count_all(result, logits, labels, *rest):
    total, _ = result
    return total, jnp.asarray(labels[:, 1:].size, jnp.int32)


@around
def _as_class_zero(targets, labels, mask, V, ignore_index):
    return targets(jnp.where(labels == ignore_index, 0, labels), None, V, ignore_index)


def _labels(change: Callable[[Any, int], Any]) -> Plant:
    @around
    def plant(targets, labels, mask, V, ignore_index):
        return targets(change(labels, ignore_index), mask, V, ignore_index)

    return plant


def _shifted_twice(labels, ignore_index):
    return jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=ignore_index)


def _not_shifted(labels, ignore_index):
    return jnp.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=ignore_index)


@around
def _mean_of_means(sums, logits, labels, mask=None, **options):
    rows = []
    for row in range(logits.shape[0]):
        one = slice(row, row + 1)
        total, count = sums(
            logits[one], labels[one], None if mask is None else mask[one], **options
        )
        rows.append(total / jnp.maximum(count, 1).astype(total.dtype))
    return jnp.mean(jnp.stack(rows)), jnp.asarray(1, jnp.int32)


@around
def _sum(mean, total, count, dtype):
    return total.astype(dtype)


def _smoothed(total, logits, targets, valid, dtype):
    uniform = jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1)
    return 0.9 * total + 0.1 * jnp.sum(jnp.where(valid, uniform, 0.0))


@around
def _from_bfloat16(summed, logits, targets, valid, dtype):
    return summed(rounded(logits), targets, valid, dtype)


@around
def _unmasked(targets, labels, mask, V, ignore_index):
    return targets(labels, None, V, ignore_index)


_targets = partial(_loss, attribute="_targets")

FAULTS = (
    _loss(
        "loss_counts_ignored",
        "the mean divides by all positions",
        on_result(_count_all),
        attribute="loss_sum_and_count",
    ),
    _targets("loss_ignored_is_class_zero", "-100 clipped to 0 and scored", _as_class_zero),
    _targets(
        "loss_shifted_twice",
        "labels shifted by the data loader and by the loss",
        _labels(_shifted_twice),
    ),
    _targets("loss_not_shifted", "a token predicts itself", _labels(_not_shifted)),
    _loss(
        "loss_mean_of_means",
        "the mean over rows of means over positions",
        _mean_of_means,
        attribute="loss_sum_and_count",
        witness="right_padding",
    ),
    _targets(
        "loss_ignores_mask",
        "padding scored wherever the labels do not say -100",
        _unmasked,
        witness="labels_at_padding",
    ),
    _loss("loss_summed", "reduction='sum'", _sum, attribute="_mean"),
    _loss(
        "loss_in_bits",
        "logarithm to base 2",
        on_result(lambda value, *args: value / math.log(2)),
        attribute="_mean",
    ),
    _loss(
        "loss_label_smoothing",
        "smoothing of 0.1 left on",
        on_result(_smoothed),
        attribute="_summed",
    ),
    _loss(
        "loss_of_bfloat16_logits",
        "logits rounded before the softmax",
        _from_bfloat16,
        attribute="_summed",
    ),
)
