"""Every barrier and every guard of the Metal kernels is needed: without it a check fails.

A mutant is a kernel's text, or a header, without one barrier or one guard. It is killed when the emulator
reports a fault or a result is wrong, of a header in one kernel at least. Barriers are found in the texts;
guards are listed here, and a condition of a text that is not listed fails a test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from metal_kernels.kernels import ALL, HEADERS, Factory, Kernel, KernelSpec
from metal_kernels.metal import MetalBackend
from tests.emulated import emulated_factory
from tests.emulator import KernelFault
from tests.mutation.checks import checks_of, most_likely_first, users_first

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
    at: int  # where it differs

    def __str__(self) -> str:
        return f"{self.place}: {self.name}"

    @property
    def kernels(self) -> list[str]:
        """Those that it may break."""
        header = HEADERS.get(self.place)
        if header is None:
            return [self.place]
        names = [spec.name for spec in ALL if header in spec.header]
        return users_first(names, header, self.at, TEXTS)

    @property
    def line(self) -> str:
        """The line of the text that it changes, as it is without it."""
        text = TEXTS[self.place]
        return text[text.rfind("\n", 0, self.at) + 1 : text.find("\n", self.at)]

    def try_all(self, backend: MetalBackend) -> None:
        """Check every kernel that it may break. Raises AssertionError or KernelFault."""
        for kernel in self.kernels:
            for check in most_likely_first(checks_of(kernel), self.line):
                check.run(backend)


def mutants() -> Iterator[Mutant]:
    for place, text in TEXTS.items():
        for number, match in enumerate(BARRIER.finditer(text)):
            rest = text[: match.start()] + ";" + text[match.end() :]
            yield Mutant(place, f"{match.group(1)}_barrier {number}", rest, match.start())
        for guard in GUARDS[place]:
            at = guard.start(text)
            rest = text[:at] + guard.without + text[at + len(guard.text) :]
            number = f" ({guard.nth + 1})" if guard.nth else ""
            name = f"{guard.text}{number} -> {guard.without}".rstrip()
            yield Mutant(place, name, rest, at)


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


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_a_kernel_as_it_is_passes(spec: KernelSpec) -> None:
    backend = MetalBackend(with_mutant(None))
    for check in checks_of(spec.name):
        check.run(backend)


@pytest.mark.parametrize("mutant", list(mutants()), ids=str)
def test_a_mutant_is_killed_or_known_to_be_harmless(mutant: Mutant) -> None:
    backend = MetalBackend(with_mutant(mutant))
    if str(mutant) in SURVIVORS:
        mutant.try_all(backend)
        return
    with pytest.raises((KernelFault, AssertionError)):
        mutant.try_all(backend)


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
