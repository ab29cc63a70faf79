"""Every barrier and every guard of the Metal kernels is needed: without it a check fails.

A mutant is a kernel's text, or a header, without one barrier or one guard. It is killed when the emulator
reports a fault or a result is wrong, of a header in one kernel at least. Barriers are found in the texts;
guards are listed here, and a condition of a text that is not listed fails a test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import cooperative_tiles
from metal_kernels.kernels import ALL, HEADERS, Factory, Kernel, KernelSpec
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Attention
from metal_kernels.replay import DeltaRows, SsmRows
from metal_kernels.rounding import row_error
from metal_kernels.tables import SequenceTables
from tests.emulated import emulated_factory
from tests.emulator import KernelFault
from tests.metal_kernels.latent_oracle import PagedLatents, latent_case
from tests.metal_kernels.mlx_products import packs_of, random_rows, rows_alone
from tests.metal_kernels.mlx_products import quantised as quantised_weights
from tests.metal_kernels.oracle import TOLERANCES, Case, Paged, quantised
from tests.metal_kernels.test_draft_units import Drafts, check_infinite_values
from tests.metal_kernels.test_replay import cases as replay_cases
from tests.metal_kernels.test_replay import check_rows
from tests.metal_kernels.test_rotary import ROTATIONS, check, check_8_bits

pytestmark = pytest.mark.mutation

TEXTS = {spec.name: spec.source() for spec in ALL} | HEADERS
BARRIER = re.compile(r"(threadgroup|simdgroup)_barrier\([^)]*\);")
# What decides something or keeps an index within its bounds.
DECISION = re.compile(r"\bif \(|\?|&&|\|\||\bmin\(")


@dataclass(frozen=True)
class Guard:
    """A piece of a kernel's text, and the same without its guard."""

    text: str
    without: str
    nth: int = 0  # occurrence of the text

    def start(self, source: str) -> int:
        at = -1
        for _ in range(self.nth + 1):
            at = source.index(self.text, at + 1)
        return at


def fence_guards(index: str, head: str, group: str) -> list[Guard]:
    """One thread writes each element of the fence."""
    return [
        Guard(f"if ({index} < 8 && ", "if ("),
        Guard(f"&& {head} == 0 ", ""),
        Guard(f"&& {group} == 0)", ")"),
    ]


def shuffles(text: str) -> list[Guard]:
    """Every value of another lane becomes the lane's own."""
    lanes = re.findall(r"ushort\(\d+\)", text)
    return [Guard(lane, "ushort(0)", lanes[:at].count(lane)) for at, lane in enumerate(lanes)]


GUARDS: dict[str, list[Guard]] = {
    "attention.h": [
        Guard("((lane >> 2) & 4)", "((lane >> 1) & 4)"),
        Guard("((lane >> 1) & 4)", "((lane >> 2) & 4)"),
        *shuffles(HEADERS["attention.h"]),
        Guard("if (cap > 0.0f) ", "", 0),
        Guard("if (cap > 0.0f) ", "", 1),
        Guard("x.x > y.x || ", ""),
        Guard(" || x.y > y.y", ""),
        Guard("highest = next;", ""),
        Guard("total *= shrink;", ""),
        Guard("if (simd_any(exceeds(next, highest))) {", "if (false) {"),
        Guard("total += weight;", ""),
        Guard("weights.x + weights.y", "weights.x"),
        Guard("if (!IS_QUANTISED) return", "if (true) return"),
        Guard("if (!IS_QUANTISED) return", "if (false) return"),
        Guard("row * (D + 4) + D)", "(row ^ 1) * (D + 4) + D)"),
        Guard(" * row_scale<D>(pool, row)", ""),
    ],
    "cooperative.h": [
        Guard("((lane >> 2) & 4)", "((lane >> 1) & 4)"),
        Guard("((lane >> 2) & 2)", "((lane >> 1) & 2)"),
        Guard("16, 32, 16, false, IS_TRANSPOSED", "16, 32, 16, false, false"),
        Guard("multiply_accumulate", "multiply"),
        Guard("sums[i] = c[i];", "sums[i % 8] = c[i];"),
        Guard("fragments[at * 4 + 2] = quad.z;", "fragments[at * 4 + 2] = quad.y;"),
    ],
    "quantise.h": [
        Guard("highest >= SMALLEST && ", ""),
        Guard(" && highest < INFINITE;", ";"),
        Guard("has_values(highest) ? as_type<float>(highest) / 127.0f : 0.0f", "1.0f"),
        Guard(
            "highest < INFINITE ? as_type<uint>(scale_of(highest)) : NOT_A_NUMBER",
            "as_type<uint>(scale_of(highest))",
        ),
    ],
    "write_kv_tokens": [
        Guard("if (word < VALUE_WORDS) {", "{"),
        *fence_guards("word", "head", "move"),
    ],
    "write_kv_pages": fence_guards("thread_index", "head", "move"),
    "quantise_kv": [
        Guard("side == 0 ? keys : values", "keys"),
        Guard("side == 0 ? k_pool : v_pool", "k_pool"),
        Guard("if (at < D) number", "number"),
        Guard("if (is_kept) value", "if (highest >= SMALLEST) value"),
        Guard("rint(number[c][i] / scale)", "(number[c][i] / scale)"),
        Guard("if (at < D) *", "*"),
        Guard("if (lane == 0) ", "if (lane == 33) "),
        *fence_guards("lane", "head", "move"),
    ],
    "rotate_and_write": [
        Guard("is_value ? head - HEADS - kv_heads : head - HEADS", "head - HEADS"),
        Guard("if (JOINED) {", "if (false) {"),
        Guard("if (!is_query) source", "source"),
        Guard("} else if (!is_query) {", "} else {"),
        Guard("is_value ? values : keys", "keys"),
        Guard("pair >= HALF ? D : IS_TRADITIONAL ? 2 * pair : pair", "pair >= HALF ? D : pair"),
        Guard("pair >= HALF ? D : IS_TRADITIONAL ? 2 * pair : pair", "pair"),
        Guard(
            "pair >= HALF ? D : IS_TRADITIONAL ? 2 * pair + 1 : pair + HALF",
            "IS_TRADITIONAL ? 2 * pair + 1 : pair + HALF",
        ),
        Guard("IS_TRADITIONAL ? 2 * pair + 1 : pair + HALF", "pair + HALF"),
        Guard("at[c] < D ? source[at[c]] : T(0.0f)", "source[at[c]]"),
        Guard("if (NORMS > int(is_value)) {", "if (!is_value) {"),
        Guard("if (NORMS > int(is_value)) {", "if (NORMS) {"),
        Guard("if (NORMS > int(is_value)) {", "if (NORMS && !is_value) {"),
        Guard("is_query ? 0 : is_value ? 2 : 1", "is_value ? 2 : 0"),
        Guard("is_query ? 0 : is_value ? 2 : 1", "is_query ? 0 : 1"),
        Guard("is_value || at[c] >= D ? 1.0f", "at[c] >= D ? 1.0f"),
        Guard("is_query ? q_weight : k_weight", "q_weight"),
        Guard("is_value || at[c] >= D ? 1.0f", "is_value ? 1.0f"),
        Guard("\nif (!is_value) {", "\n{"),
        Guard("if (at[2 * c] < D) {", "{"),
        Guard("if (is_query || !IS_QUANTISED) {", "if (!IS_QUANTISED) {"),
        Guard("is_query || !IS_QUANTISED", "is_query"),
        Guard("if (!is_query) out", "out"),
        Guard("is_value ? v_pool : k_pool", "k_pool", 0),
        Guard("is_value ? v_pool : k_pool", "k_pool", 1),
        Guard("if (at[c] < D) out", "out"),
        Guard("is_kept ? char", "highest >= SMALLEST ? char"),
        Guard("if (at[c] < D) stored", "stored"),
        Guard("if (lane == 0) ", "if (lane == 33) "),
        *fence_guards("lane", "head", "move"),
    ],
    "copy_pages": fence_guards("thread_index", "head", "move"),
    "gather_pages": [
        Guard("place == 0 ? skipped : 0", "0"),
        Guard("min(page_size, skipped + seen - place * page_size)", "page_size"),
        Guard("if (IS_QUANTISED) {", "if (false) {"),
        *fence_guards("thread_index", "head", "place"),
    ],
    "paged_decode": [
        Guard("IS_QUANTISED ? D + 4 : D", "D"),
        Guard("if (IS_QUANTISED && is_seen[k]) {", "if (IS_QUANTISED) {"),
        Guard("(k_pool, tile + k)", "(k_pool, tile + (k ^ 1))"),
        Guard("(v_pool, tile + k)", "(v_pool, tile + (k ^ 1))"),
        Guard("if (IS_QUANTISED) product *= key_scale[k];", ""),
        Guard("IS_QUANTISED ? weight * value_scale[k] : weight", "weight"),
        Guard("min(first_head + h, GROUP - 1)", "(first_head + h)"),
        Guard("if (at < D) query", "query"),
        Guard("key + k >= first_key && ", ""),
        Guard("&& key + k < end_key", ""),
        Guard("if (is_seen[k] && ", "if ("),
        Guard("&& at < D) {", ") {"),
        Guard("product = capped(product, cap);", ""),
        Guard("is_seen[k] ? product : LOWEST", "product"),
        Guard("FITTING < HEADS ? FITTING : HEADS", "FITTING"),
        Guard("FITTING < HEADS ? FITTING : HEADS", "HEADS"),
        Guard("if (lane == 0) {", "{"),
        Guard("r < ROUND && ", "", 0),
        Guard("&& round + r < HEADS", "", 0),
        Guard("if (at < D) sums", "sums"),
        Guard("r < ROUND && ", "", 1),
        Guard("&& round + r < HEADS", "", 1),
        Guard("if (head >= GROUP) continue;", ""),
        Guard("if (lane < 4) partial", "partial"),
        *fence_guards("thread_index_in_threadgroup", "threadgroup_position_in_grid.y", "partition"),
    ],
    "draft_decode": [
        Guard("IS_QUANTISED ? D + 4 : D", "D"),
        Guard("unit[ROWS - 1] < 0 ? 0 : partitions[4 * last + 2]", "partitions[4 * last + 2]"),
        Guard("max(unit[ROWS - 1], 0)", "max(unit[0], 0)"),
        Guard("min(first_line + h, LINES - 1)", "(first_line + h)"),
        Guard("own < 0 ? last : own", "own"),
        Guard("own < 0 ? 0 : partitions[4 * listed + 2]", "partitions[4 * listed + 2]"),
        Guard("if (at < D) query", "query"),
        Guard("if (IS_QUANTISED) {", "if (false) {"),
        Guard("(k_pool, tile + k)", "(k_pool, tile + (k ^ 1))"),
        Guard("(v_pool, tile + k)", "(v_pool, tile + (k ^ 1))"),
        Guard("if (at < D) {", "{"),
        Guard("if (key >= end[h]) continue;", ""),
        Guard("if (IS_QUANTISED) product *= key_scale[k];", ""),
        Guard("product = capped(product, cap);", ""),
        Guard("key + k >= begin[h] && key + k < end[h] ? product", "key + k < end[h] ? product"),
        Guard("key + k >= begin[h] && key + k < end[h] ? product", "key + k >= begin[h] ? product"),
        Guard("IS_QUANTISED ? weight * value_scale[k] : weight", "weight"),
        Guard("if (key + k < begin[h] || key + k >= end[h]) continue;", ""),
        Guard("if (key + k < begin[h] || ", "if ("),
        Guard(" || key + k >= end[h]) continue;", ") continue;"),
        Guard("FITTING < HEADS ? FITTING : HEADS", "FITTING"),
        Guard("FITTING < HEADS ? FITTING : HEADS", "HEADS"),
        Guard("if (lane == 0) {", "{"),
        Guard("r < ROUND && ", "", 0),
        Guard("&& round + r < HEADS", "", 0),
        Guard("if (at < D) sums", "sums"),
        Guard("r < ROUND && ", "", 1),
        Guard("&& round + r < HEADS", "", 1),
        Guard("if (line >= LINES || ", "if ("),
        Guard(" || unit[line / GROUP] < 0) continue;", ") continue;"),
        Guard("if (lane < 4) partial", "partial"),
        *fence_guards("thread_index_in_threadgroup", "kv_head", "threadgroup_position_in_grid.z"),
    ],
    "grouped_decode": [
        Guard("IS_QUANTISED ? D + 4 : D", "D"),
        Guard("SPLIT > 1 ? SPLIT * PARTS * TURNS * KEYS * 8 : 1", "1"),
        Guard("min(first_head + column, GROUP - 1)", "(first_head + column)"),
        Guard("min(first_head + column + 1, GROUP - 1)", "(first_head + column + 1)"),
        Guard("if (SPLIT == 1 && key >= end_key) break;", "if (key >= end_key) break;"),
        Guard("min(key, end_key - 1)", "key"),
        Guard("if (SPLIT > 1) {", "if (false) {"),
        Guard("mine >= first_key && ", ""),
        Guard("&& mine < end_key", ""),
        Guard("if (IS_QUANTISED) score", "if (false) score"),
        Guard("score[k] = capped(score[k], cap);", ""),
        Guard("if (!is_seen) ", ""),
        Guard("column_max(next.x)", "next.x"),
        Guard("column_max(next.y)", "next.y"),
        Guard("column_sum(softmax.total.x)", "softmax.total.x"),
        Guard("column_sum(softmax.total.y)", "softmax.total.y"),
        Guard("if (IS_QUANTISED && key", "if (key"),
        Guard("if (IS_QUANTISED && key", "if (false && key"),
        Guard("&& key + 8 * k + line < end_key", ""),
        Guard("if (one < end_key) ", ""),
        Guard("if (one + 1 < end_key) ", ""),
        Guard("if (line == 0 && split == 0) {", "if (split == 0) {"),
        Guard("if (line == 0 && split == 0) {", "if (line == 0) {"),
        Guard("if (first_head + i / BLOCK < GROUP) {", "{"),
        Guard("if (turn == 0 && split == 0 && first", "if (split == 0 && first"),
        Guard("if (turn == 0 && split == 0 && first", "if (turn == 0 && first"),
        Guard("&& first_head + lane / 4 < GROUP", ""),
        *fence_guards("thread_index_in_threadgroup", "threadgroup_position_in_grid.y", "partition"),
    ],
    "grouped_drafts": [
        Guard("IS_QUANTISED ? D + 4 : D", "D"),
        Guard("unit[ROWS - 1] < 0 ? 0 : partitions[4 * last + 2]", "partitions[4 * last + 2]"),
        Guard("max(unit[ROWS - 1], 0)", "max(unit[0], 0)"),
        Guard("min(first_head + column, GROUP - 1)", "(first_head + column)"),
        Guard("min(first_head + column + 1, GROUP - 1)", "(first_head + column + 1)"),
        Guard("unit[r] < 0 ? last : unit[r]", "unit[r]"),
        Guard("unit[r] < 0 ? 0 : partitions[4 * listed + 2]", "partitions[4 * listed + 2]"),
        Guard("if (key >= end[r]) continue;", "", 0),
        Guard("mine >= begin[r] && ", ""),
        Guard("&& mine < end[r]", ""),
        Guard("if (IS_QUANTISED) score", "if (false) score"),
        Guard("score[k] = capped(score[k], cap);", ""),
        Guard("if (!is_seen) ", ""),
        Guard("column_max(next.x)", "next.x"),
        Guard("column_max(next.y)", "next.y"),
        Guard("if (IS_QUANTISED && key", "if (key"),
        Guard("if (IS_QUANTISED && key", "if (false && key"),
        Guard("&& key + 8 * k + line < end[r]", ""),
        Guard("if (key >= end[r]) continue;", "", 1),
        Guard("one < end[r] ? float(one_value[i]) : 0.0f", "float(one_value[i])"),
        Guard("one + 1 < end[r] ? float(other_value[i]) : 0.0f", "float(other_value[i])"),
        Guard("column_sum(softmax[r].total.x)", "softmax[r].total.x"),
        Guard("column_sum(softmax[r].total.y)", "softmax[r].total.y"),
        Guard("if (line == 0) {", "{"),
        Guard("if (is_row && first_head + i / BLOCK < GROUP) {", "if (is_row) {"),
        Guard("if (is_row && first_head + i", "if (first_head + i"),
        Guard("if (is_row && turn == 0 && first", "if (turn == 0 && first"),
        Guard("if (is_row && turn == 0 && first", "if (is_row && first"),
        Guard("&& first_head + lane / 4 < GROUP", ""),
        *fence_guards(
            "thread_index_in_threadgroup",
            "threadgroup_position_in_grid.y",
            "threadgroup_position_in_grid.z",
        ),
    ],
    "merge_partitions": [
        Guard("numbers[2] > 0.0f ? float(sinks[head]) * LOG2_E : LOWEST", "float(sinks[head])"),
        Guard("if (d < D) sum[c]", "sum[c]"),
        Guard("if (d < D) sums", "sums"),
        Guard("if (lane == 0) totals", "totals"),
    ],
    "cooperative_prefill": [
        Guard("line < num_lines ? row * heads + head : -1", "row * heads + head"),
        Guard("HAS_ENDS && line < num_lines ?", "HAS_ENDS ?"),
        Guard("HAS_ENDS && line < num_lines ?", "line < num_lines ?"),
        Guard("- 1 - my_positions[r] : 0", "- my_positions[r] : 0"),
        Guard("numbers[2] > 0.0f ? float(sinks[head]) * LOG2_E : LOWEST", "float(sinks[0])"),
        Guard("my_column == 0 ? 1.0f : 0.0f", "1.0f"),
        Guard("if (key < end_key) {", "{"),
        Guard("if (my_rows[r] >= 0) numbers", "numbers"),
        Guard("if (slots[i] >= 0) ", ""),
        Guard("capped(scores[at] * factor, cap)", "scores[at] * factor"),
        Guard("distance < -aheads[r] || ", ""),
        Guard(" || distance >= window", ""),
        Guard("line_max(next)", "next"),
        Guard("if (simd_any(next > softmax[r].highest)) {", "if (false) {"),
        Guard("*= shrink;", ";"),
        Guard("i / 4 * 8 + r * 4 + i % 4] *= shrink;", "r * 4 + i % 4] *= shrink;"),
        Guard("if (slots[which] >= 0) ", ""),
        Guard("line_sum(softmax[r].total)", "softmax[r].total"),
        Guard("if (my_rows[r] >= 0) {", "{"),
        *fence_guards("thread_index_in_threadgroup", "kv_head", "threadgroup_position_in_grid.z"),
    ],
    "paged_prefill": [
        Guard("if (line < num_lines) {", "{", 0),
        Guard("if (line < num_lines) {", "{", 1),
        Guard("SPLIT > 1 ? SPLIT * SIDE * SCORE_STRIDE : 1", "1"),
        Guard("numbers[2] > 0.0f ? float(sinks[my_head]) * LOG2_E : LOWEST", "float(sinks[0])"),
        Guard("my_column == 0 ? 1.0f : 0.0f", "1.0f"),
        Guard("if (key < end_key) {", "{", 0),
        Guard("if (key < end_key) {", "{", 1),
        Guard("score[k] = capped(score[k], cap);", ""),
        Guard("HAS_ENDS && line < num_lines ?", "HAS_ENDS ?"),
        Guard("HAS_ENDS && line < num_lines ?", "line < num_lines ?"),
        Guard("- 1 - my_position : 0", "- my_position : 0"),
        Guard("distance < -ahead || ", ""),
        Guard("|| distance >= window", ""),
        Guard("distance < 1 - ahead || ", ""),
        Guard("|| distance > window", ""),
        Guard("if (SPLIT > 1) ", "", 0),
        Guard("if (SPLIT > 1) {", "{"),
        Guard("if (TILES == 1) ", "if (false) ", 0),
        Guard("if (TILES == 1) ", "if (false) ", 1),
        Guard("line_max(next)", "next"),
        Guard("line_sum(softmax.total)", "softmax.total"),
        *fence_guards("thread_index", "kv_head", "threadgroup_position_in_grid.z"),
    ],
    "paged_latent": [
        Guard("IS_PARTIAL ? LATENT + 4 : LATENT", "LATENT"),
        Guard("if (line < num_lines) {", "{"),
        Guard("at < LATENT_QUADS ?", "true ?", 0),
        Guard("if (simdgroup * 8 / KEYS == round) {", "{"),
        Guard("if (key < end_key) {", "{"),
        Guard("at < LATENT_QUADS ?", "true ?", 1),
        Guard("SPLIT > 1 ? SPLIT * LINES * SCORE_STRIDE : 1", "1"),
        Guard("if (SPLIT > 1) ", "", 0),
        Guard("if (SPLIT > 1) ", "if (false) ", 1),
        Guard("if (SPLIT > 1) {", "{"),
        Guard("if (key > my_position) ", ""),
        Guard("if (key + 1 > my_position) ", ""),
        Guard("line_max(next)", "next"),
        Guard("line_sum(softmax.total)", "softmax.total"),
        Guard("if (line < num_lines) {", "{", 1),
        Guard("IS_PARTIAL ? 1.0f : total", "total"),
        Guard("if (IS_PARTIAL && part == 0) {", "if (part == 0) {"),
        Guard("if (IS_PARTIAL && part == 0) {", "if (IS_PARTIAL) {"),
        Guard("if (thread_index < 8 && ", "if ("),
        Guard("&& threadgroup_position_in_grid.z == 0)", ")"),
    ],
    "qmv_rows": [
        Guard("k < depth", "k < depth - NUMBERS"),
        Guard("= packed[p];", "= packed[0];"),
        Guard("k / GROUP", "0"),
        Guard("if (BITS == 4) {", "if (true) {"),
        Guard("if (BITS == 4) {", "if (false) {"),
        Guard("sum += a + b + c + d;", "sum += a; sum += b; sum += c; sum += d;"),
        Guard("b / 16.0f", "b"),
        Guard("i % IN_WORD * BITS", "0"),
        Guard("if (BITS == 4) {", "if (true) {", 1),
        Guard("if (BITS == 4) {", "if (false) {", 1),
        Guard("sum * bias[c]", "bias[c]"),
        Guard("simd_sum(result[r][c])", "result[r][c]"),
        Guard("if (lane == 0) ", ""),
        Guard("if (lane == 0) ", "if (lane == 33) "),
    ],
    "replay_delta": [
        Guard("DK == 128 && ", ""),
        Guard("&& DV % 8 == 0", ""),
        Guard(" && !GATES", ""),
        Guard(" && sizeof(S) == 4", ""),
        Guard("head / (HV / HK)", "head % HK"),
        Guard("first + spans[long(sequence) * 3 + 2]", "first + 1"),
        Guard("long(source)", "long(sequence)"),
        Guard("GATES ? DK : 1", "DK"),
        Guard("GATES ? DK : 1", "1"),
        Guard("GATES ? lane", "true ? lane"),
        Guard("GATES ? lane", "false ? lane"),
        Guard("if (IS_PACKED) {", "if (true) {", 0),
        Guard("if (IS_PACKED) {", "if (false) {", 0),
        Guard("if (IS_PACKED) {", "if (true) {", 1),
        Guard("if (IS_PACKED) {", "if (false) {", 1),
        Guard("held = simd_sum(held);", ""),
        Guard(" * float(beta[row * HV + head]);", ";"),
        Guard("number[i] = float(S(number[i]));", ""),
        Guard("if (!KEEPS) {", "{"),
        Guard("if (!KEEPS) {", "if (false) {"),
        Guard("if (lane == 0) ", ""),
        Guard("if (lane == 0) ", "if (lane == 33) "),
        Guard("if (KEEPS) {", "{"),
        Guard("if (KEEPS) {", "if (false) {"),
    ],
    "replay_ssm": [
        Guard("head / (HEADS / GROUPS)", "head % GROUPS"),
        Guard("first + spans[long(sequence) * 3 + 2]", "first + 1"),
        Guard("long(source)", "long(sequence)"),
        Guard("number[i] = float(S(number[i]));", ""),
        Guard("if (!KEEPS) {", "{"),
        Guard("if (!KEEPS) {", "if (false) {"),
        Guard("if (lane == 0) ", ""),
        Guard("if (lane == 0) ", "if (lane == 33) "),
        Guard("sum + input * float(D[head])", "sum"),
        Guard("if (KEEPS) {", "{"),
        Guard("if (KEEPS) {", "if (false) {"),
    ],
}
# Decisions that guard nothing: they choose between equals by head dimension or lane.
CHOICES = {
    "draft_decode": [
        "D % 128 == 0 ? 4 : D % 64 == 0 ? 2 : 4",
        "lane == 0 ? most : lane == 1 ? weight : 0.0f",
    ],
    "quantise_kv": ["D % 128 == 0 ? 4 : D % 64 == 0 ? 2 : 4"],
    "paged_decode": [
        "PARTS > 2 ? 2 : 4",
        "D > 256 ? 2 : 4",
        "D % 128 == 0 ? 4 : D % 64 == 0 ? 2 : 4",
        "lane == 0 ? most : lane == 1 ? weight : 0.0f",
    ],
    "grouped_decode": [
        "D > 192 ? 2 : 1",
        "PARTS * SPLIT > 2 ? 2 : 4",
        "DIMS % 32 == 0 ? 4 : 2",
        "i == 0 ? highest_of_all : i == 1 ? weight : 0.0f",
    ],
    "grouped_drafts": [
        "PARTS > 2 ? 2 : 4",
        "D % 32 == 0 ? 4 : 2",
        "i == 0 ? highest_of_all : i == 1 ? weight : 0.0f",
    ],
    "cooperative_prefill": ["D > 128 ? 2 : 1", "if (distance < -aheads[r] "],
    "paged_prefill": ["D > 192 ? 2 : 1", "if (distance < -ahead ", "if (distance < 1 - ahead "],
    "paged_latent": [
        "LATENT > 256 ? 2 : 1",
        "i == 0 ? softmax.highest : i == 1 ? total : 0.0f",
    ],
}
# Mutants that no test can kill, and why they cannot matter.
_NO_CHAR = "a NaN that becomes a char is 0 on this machine; the language leaves it open"
_MORE_MEMORY = "reserves more threadgroup memory than its heads need, never more than 24 KB"
SURVIVORS = {
    "quantise.h:  && highest < INFINITE; -> ;": _NO_CHAR,
    "quantise_kv: if (is_kept) value -> if (highest >= SMALLEST) value": _NO_CHAR,
    "rotate_and_write: is_kept ? char -> highest >= SMALLEST ? char": _NO_CHAR,
    "paged_decode: FITTING < HEADS ? FITTING : HEADS -> FITTING": _MORE_MEMORY,
    "draft_decode: if (key >= end[h]) continue; ->": "skips keys that weigh nothing",
    "draft_decode: FITTING < HEADS ? FITTING : HEADS -> FITTING": _MORE_MEMORY,
    "grouped_drafts: if (key >= end[r]) continue; ->": "skips keys that weigh nothing",
    "grouped_drafts: if (key >= end[r]) continue; (2) ->": (
        "multiplies weights that are not set, and 0 in the emulator, by zeros"
    ),
    "grouped_drafts: unit[ROWS - 1] < 0 ? 0 : partitions[4 * last + 2] -> partitions[4 * last + 2]": (
        "a unit that pads the list reads keys that no row sees"
    ),
    "grouped_drafts: unit[r] < 0 ? 0 : partitions[4 * listed + 2] -> partitions[4 * listed + 2]": (
        "computes what is never stored"
    ),
    "draft_decode: unit[ROWS - 1] < 0 ? 0 : partitions[4 * last + 2] -> partitions[4 * last + 2]": (
        "a unit that pads the list reads keys that no row sees"
    ),
    "draft_decode: own < 0 ? 0 : partitions[4 * listed + 2] -> partitions[4 * listed + 2]": (
        "computes what is never stored"
    ),
}


@dataclass(frozen=True)
class Mutant:
    place: str  # a kernel or a header
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.name}"

    @property
    def kernels(self) -> list[str]:
        """Those that it may break."""
        header = HEADERS.get(self.place)
        return [
            spec.name
            for spec in ALL
            if spec.name == self.place or (header is not None and header in spec.header)
        ]


def mutants() -> Iterator[Mutant]:
    for place, text in TEXTS.items():
        for number, match in enumerate(BARRIER.finditer(text)):
            rest = text[: match.start()] + ";" + text[match.end() :]
            yield Mutant(place, f"{match.group(1)}_barrier {number}", rest)
        for guard in GUARDS[place]:
            at = guard.start(text)
            rest = text[:at] + guard.without + text[at + len(guard.text) :]
            number = f" ({guard.nth + 1})" if guard.nth else ""
            yield Mutant(place, f"{guard.text}{number} -> {guard.without}".rstrip(), rest)


def with_mutant(mutant: Mutant | None) -> Factory:
    """Emulated kernels with every check, one text of them mutated."""
    make = emulated_factory(check=True)

    def factory(spec: KernelSpec, source: str) -> Kernel:
        if mutant is None or spec.name not in mutant.kernels:
            return make(spec, source)
        if mutant.place in HEADERS:
            header = spec.header.replace(HEADERS[mutant.place], mutant.text)
            return make(replace(spec, header=header), source)
        return make(spec, mutant.text)

    return factory


def decodes() -> Iterator[Case]:
    """Several rounds of merging with a head that does not exist; idle lanes; a window, a softcap."""
    large = {"key_dim": 256, "value_dim": 256, "group": 7, "dtype": mx.float16}
    yield Case(((0, 1), (33, 1), (257, 1)), **large)
    small = {"key_dim": 80, "value_dim": 80, "group": 2, "dtype": mx.float16}
    yield Case(((0, 1), (18, 1), (16, 1), (40, 1)), **small)
    yield Case(((20, 1), (18, 1)), window=7, softcap=2.0, **small)
    yield Case(((20, 1), (18, 1)), window=7, is_quantised=True, **small)


def grouped_decodes() -> Iterator[Case]:
    """Heads that do not exist; two simdgroups that share dimensions, for two rounds of keys; windows."""
    small = {"key_dim": 80, "value_dim": 80, "group": 9, "dtype": mx.float16}
    yield Case(((0, 1), (18, 1), (16, 1), (70, 1)), **small)
    yield Case(((70, 1), (18, 1)), window=7, softcap=2.0, **small)
    yield Case(((20, 1), (18, 1)), window=7, is_quantised=True, **{**small, "group": 5})
    large = {"key_dim": 512, "value_dim": 512, "group": 9, "dtype": mx.float16}
    yield Case(((127, 1), (2, 1)), kv_heads=3, **large)


def attends_by_short_page_tables(backend: MetalBackend) -> None:
    """Where two simdgroups share dimensions, those without keys must read no page past the table's end."""
    sizes = {"key_dim": 512, "value_dim": 512, "dtype": mx.float16}
    found = Paged(backend, Case(((16, 1),) * 4, group=8, **sizes))
    found.tables = replace(found.tables, page_tables=found.tables.page_tables[:, :2].copy())
    assert found.error() <= found.tolerance


def attends_where_one_head_finds_a_larger_key(backend: MetalBackend) -> None:
    """The maximum of every other head grows by 300, the others' stay: weights would be infinite."""
    kv_heads, group, dim, context = 8, 8, 64, 256
    tables = SequenceTables(
        np.arange(context // 16, dtype=np.int32)[None],
        np.array([context], np.int32),
        np.array([0, 1], np.int32),
        16,
    )
    is_late = np.arange(context) >= context // 2
    keys = np.zeros((context, kv_heads, dim), np.float32)
    keys[is_late, :, 0] = 1
    values = np.random.default_rng(0).standard_normal(keys.shape, np.float32)
    pools = [backend.new_pool(context // 16, kv_heads, 16, dim, mx.float32) for _ in range(2)]
    slots = np.arange(context, dtype=np.int32)
    backend.write_kv(mx.array(keys), mx.array(values), *pools, slots)
    for first in (0, 1):
        queries = np.zeros((1, kv_heads * group, dim), np.float32)
        queries[:, first::2, 0] = 300
        found = backend.paged_decode(mx.array(queries), *pools, tables, Attention(1.0))
        expected = np.repeat(values.mean(axis=0), group, axis=0)
        expected[first::2] = np.repeat(values[is_late].mean(axis=0), group // 2, axis=0)
        assert row_error(np.array(found), expected[None]) <= TOLERANCES[mx.float32], first


def prefills() -> Iterator[Case]:
    """Chunks that fill no tile; keys that fill no page; a window and a softcap; dimensions in two parts; images."""
    large = {"key_dim": 512, "value_dim": 512, "group": 2, "dtype": mx.float16}
    sizes = {"key_dim": 80, "value_dim": 80, "group": 2, "dtype": mx.float16}
    yield Case(((0, 5), (20, 30), (1, 2)), **sizes)
    yield Case(((40, 20), (3, 1)), window=13, softcap=2.0, has_sinks=True, **sizes)
    yield Case(((40, 20), (3, 1)), is_quantised=True, **sizes)
    yield Case(((3, 6), (20, 2)), **large)
    yield Case(((0, 21), (3, 9)), images=((2, 11), (11, 19), (4, 8)), **sizes)


def cooperative_prefills() -> Iterator[Case]:
    """Chunks that fill no tile; keys that fill no page; a window and a softcap; dimensions in two parts; images."""
    sizes = {"group": 3, "dtype": mx.float16}
    yield Case(((0, 5), (20, 30), (1, 2)), **sizes)
    yield Case(((70, 20), (3, 1)), window=13, softcap=2.0, has_sinks=True, **sizes)
    yield Case(((40, 20), (3, 1)), is_quantised=True, **sizes)
    yield Case(((3, 12), (20, 2)), key_dim=256, value_dim=256, **sizes)
    yield Case(((0, 21), (3, 9)), images=((2, 11), (11, 19), (4, 8)), **sizes)


def latents() -> Iterator[Case]:
    """More lines than a tile has keys, fewer lines than a tile has; dimensions in two parts."""
    yield latent_case(((0, 1), (70, 1)), 20, (256, 64))
    yield latent_case(((0, 2), (20, 17)), 3, (256, 64))
    for rows in (6, 1):
        yield latent_case(((3, rows),), 5, (512, 64), mx.float16)


def attends_latents(backend: MetalBackend) -> None:
    for case in latents():
        found = PagedLatents(backend, case)
        assert found.error() <= found.tolerance, case


def attends(backend: MetalBackend, cases: Iterator[Case]) -> None:
    for case in cases:
        found = Paged(backend, case)
        assert found.error() <= found.tolerance, case


def writes(backend: MetalBackend) -> None:
    """Whole pages, single rows and a copy, of several heads each; rows of different lengths."""
    latents = [backend.new_pool(5, 1, 16, dim, mx.float32) for dim in (256, 64)]
    rows = mx.random.normal((2, 1, 256), key=mx.random.key(2))
    backend.write_kv(rows, rows[:, :, :64], *latents, np.array([3, 78], np.int32))
    held = backend.read_kv(*latents, np.arange(80, dtype=np.int32))
    for pool, dim in zip(held, (256, 64), strict=True):
        assert mx.array_equal(pool[mx.array([3, 78])], rows[:, :, :dim])
        assert not pool[4:78].any()
    pools = [backend.new_pool(5, 2, 16, 64, mx.float32) for _ in range(2)]
    slots = np.array([3, *range(32, 64), 70], np.int32)
    rows = mx.random.normal((len(slots), 2, 64), key=mx.random.key(1))
    backend.write_kv(rows, rows + 1, *pools, slots)
    sources, targets = np.array([2, 3], np.int32), np.array([0, 1], np.int32)
    backend.copy_pages(*pools, sources, targets, 16)
    backend.settle()
    for pool, wanted in zip(pools, (rows, rows + 1), strict=True):
        held = np.array(pool).swapaxes(1, 2).reshape(80, 2, 64)
        assert np.array_equal(held[32:64], np.array(wanted)[1:33])
        assert np.array_equal(held[70], np.array(wanted)[33])
        assert np.array_equal(held[:32], held[32:64])


def quantises(backend: MetalBackend) -> None:
    """Rows of zeros, next to zero, with NaN and infinity; dimensions that leave lanes idle."""
    for head_dim in (64, 80):
        rows = np.random.default_rng(head_dim).standard_normal((2, 6, 2, head_dim), np.float32)
        rows[0, 1, 0], rows[0, 2, 1], rows[1, 3, 0, 5], rows[1, 4, 1, 7] = 0, 1e-37, np.nan, np.inf
        pools = [backend.new_pool(2, 2, 16, head_dim, mx.int8) for _ in range(2)]
        slots = np.array([3, 4, 5, 20, 21, 31], np.int32)
        backend.write_kv(mx.array(rows[0]), mx.array(rows[1]), *pools, slots)
        held = backend.read_kv(*pools, np.arange(32, dtype=np.int32))
        for pool, side in zip(held, rows, strict=True):
            values, scales = quantised(side)
            found = np.array(pool)
            assert np.array_equal(found[slots, :, :-4], values)
            assert np.array_equal(found[slots, :, -4:], scales.view(np.int8))
            assert not np.delete(found, slots, axis=0).any()


def attends_with_drafts(backend: MetalBackend) -> None:
    """Idle lanes, a head that does not exist, two rounds of merging; windows, a softcap, 8 bits; infinite values."""
    sequences = ((63, 4), (126, 5))
    Drafts(group=3, head_dim=80, window=21, softcap=2.0, sequences=sequences).check(backend)
    in_8_bits = Drafts(group=2, head_dim=256, is_quantised=True, kv_heads=2, sequences=sequences)
    in_8_bits.check(backend)
    check_infinite_values(backend)


def attends_with_drafts_of_large_groups(backend: MetalBackend) -> None:
    """Heads that do not exist, in two parts and a few turns; windows, a softcap, 8 bits; infinite values."""
    sequences = ((63, 4), (126, 5))
    Drafts(group=9, head_dim=80, window=21, softcap=2.0, sequences=sequences).check(backend)
    in_8_bits = Drafts(group=4, head_dim=64, is_quantised=True, kv_heads=2, sequences=sequences)
    in_8_bits.check(backend)
    check_infinite_values(backend, 8)


def multiplies(backend: MetalBackend) -> None:
    """Rows of whole blocks and lanes without numbers, as MLX's own kernels multiply each alone."""
    for width, bits in ((512, 4), (384, 8)):
        weights = quantised_weights(8, width, bits, 32, mx.float32)
        rows = random_rows(2, weights)
        found = backend.few_rows.product(rows, weights, packs_of(weights))
        assert mx.array_equal(found, rows_alone(rows, weights)), bits


def replays(backend: MetalBackend, kind: type) -> None:
    """Rows after each state, as mlx-lm's own kernels compute each alone; states in 16 bits as well."""
    for dtype in (mx.float32, mx.bfloat16):
        for case in replay_cases(dtype).values():
            if isinstance(case[0], kind):
                check_rows(backend.replay, case)


def exercise(kernel: str, backend: MetalBackend) -> None:
    """What a kernel has to do right. Raises AssertionError or KernelFault."""
    if kernel in ("paged_decode", "merge_partitions"):
        attends(backend, decodes())
    elif kernel == "grouped_decode":
        attends(backend, grouped_decodes())
        attends_by_short_page_tables(backend)
        attends_where_one_head_finds_a_larger_key(backend)
    elif kernel == "paged_prefill":
        attends(backend, prefills())
    elif kernel == "cooperative_prefill":
        with pytest.MonkeyPatch.context() as patch:
            rows = {(dim, dtype): 1 for dim in (64, 256) for dtype in cooperative_tiles.DTYPES}
            patch.setattr(cooperative_tiles, "timed_rows", rows)
            attends(backend, cooperative_prefills())
    elif kernel == "gather_pages":
        long = Case(((40, 256),), dtype=mx.float16)
        windowed = replace(long, sequences=((100, 256),), window=70)
        full = replace(
            long, sequences=((266, 256),), window=257
        )  # as many positions as there is room for
        attends(backend, iter([windowed, replace(long, is_quantised=True), full]))
    elif kernel == "rotate_and_write":
        for case in ROTATIONS:
            check(backend, case)
        check_8_bits(backend)
    elif kernel == "quantise_kv":
        quantises(backend)
    elif kernel == "paged_latent":
        attends_latents(backend)
    elif kernel == "draft_decode":
        attends_with_drafts(backend)
    elif kernel == "grouped_drafts":
        attends_with_drafts_of_large_groups(backend)
    elif kernel == "qmv_rows":
        multiplies(backend)
    elif kernel == "replay_delta":
        replays(backend, DeltaRows)
    elif kernel == "replay_ssm":
        replays(backend, SsmRows)
    else:
        writes(backend)


def exercise_all(kernels: list[str], backend: MetalBackend) -> None:
    for kernel in kernels:
        exercise(kernel, backend)


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_a_kernel_as_it_is_passes(spec: KernelSpec) -> None:
    exercise(spec.name, MetalBackend(with_mutant(None)))


@pytest.mark.parametrize("mutant", list(mutants()), ids=str)
def test_a_mutant_is_killed_or_known_to_be_harmless(mutant: Mutant) -> None:
    backend = MetalBackend(with_mutant(mutant))
    if str(mutant) in SURVIVORS:
        exercise_all(mutant.kernels, backend)
        return
    with pytest.raises((KernelFault, AssertionError)):
        exercise_all(mutant.kernels, backend)


def test_every_survivor_is_a_mutant() -> None:
    assert set(SURVIVORS) <= set(map(str, mutants()))


@pytest.mark.parametrize("place", TEXTS)
def test_every_decision_of_a_text_is_listed(place: str) -> None:
    text = TEXTS[place]
    listed: set[int] = set()
    for guard in [*GUARDS[place], *(Guard(choice, "") for choice in CHOICES.get(place, ()))]:
        at = guard.start(text)
        listed.update(range(at, at + len(guard.text)))
    missed = [
        text[match.start() :].split("\n")[0]
        for match in DECISION.finditer(text)
        if match.start() not in listed
    ]
    assert missed == []
