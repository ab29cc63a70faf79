// Rows of drafts through a gated delta net: their outputs, or the states after them. A row's results equal bit by bit
// those of mlx-lm's kernel for that row alone: the same lanes hold the same numbers, and add them in the same order.
//
// q, k   (T, HK, DK)
// v      (T, HV, DV)
// g      (T, HV) float, or (T, HV, DK) if GATES
// beta   (T, HV)
// state  (B, HV, DV, DK)  of type S
// spans  (>= SEQUENCES, 3) int32: a state, the first of the rows that follow it, and their number
// out    (T, HV, DV), or if KEEPS the states after the rows (SEQUENCES, HV, DV, DK)  of type T
//
// template: S, T, HK, HV, DK (a multiple of 32), DV, GATES, KEEPS. A simdgroup has one value of a head and its DK numbers
// in registers: grid (32, DV, SEQUENCES * HV), four simdgroups a threadgroup.

constexpr int NUMBERS = DK / 32;  // of a lane
// mlx-lm has a kernel of its own for these, which writes the order of its sums out.
constexpr bool IS_PACKED = DK == 128 && DV % 8 == 0 && !GATES && sizeof(S) == 4;

const int lane = int(thread_index_in_simdgroup);
const int value = int(thread_position_in_grid.y);
const int sequence = int(thread_position_in_grid.z) / HV;
const int head = int(thread_position_in_grid.z) % HV;
const int key_head = head / (HV / HK);
const long span = long(sequence) * 3;
const int first = spans[span + 1];
const int end = first + spans[span + 2];

const long before = ((long(spans[span]) * HV + head) * DV + value) * DK + lane * NUMBERS;
float number[NUMBERS];
#pragma clang loop unroll(full)
for (int i = 0; i < NUMBERS; i++) number[i] = float(state[before + i]);

for (int row = first; row < end; row++) {
  const long at_head = long(row) * HV + head;
  const long at_key = (long(row) * HK + key_head) * DK + lane * NUMBERS;
  float held = 0.0f;
  #pragma clang loop unroll(full)
  for (int i = 0; i < NUMBERS; i++) {
    number[i] = number[i] * (GATES ? float(g[at_head * DK + lane * NUMBERS + i]) : float(g[at_head]));
    held += number[i] * float(k[at_key + i]);
  }
  if (IS_PACKED) {
    #pragma clang loop unroll(full)
    for (ushort apart = 1; apart < 32; apart *= 2) held += simd_shuffle_xor(held, apart);
  } else {
    held = simd_sum(held);
  }
  const float delta = (float(v[at_head * DV + value]) - held) * float(beta[at_head]);
  float sum = 0.0f;
  #pragma clang loop unroll(full)
  for (int i = 0; i < NUMBERS; i++) {
    number[i] = number[i] + float(k[at_key + i]) * delta;
    sum += number[i] * float(q[at_key + i]);
    // As if it had been stored after the row.
    number[i] = float(S(number[i]));
  }
  if (!KEEPS) {
    if (IS_PACKED) {
      #pragma clang loop unroll(full)
      for (ushort apart = 1; apart < 32; apart *= 2) sum += simd_shuffle_xor(sum, apart);
    } else {
      sum = simd_sum(sum);
    }
    if (lane == 0) out[at_head * DV + value] = T(sum);
  }
}

if (KEEPS) {
  const long after = ((long(sequence) * HV + head) * DV + value) * DK + lane * NUMBERS;
  #pragma clang loop unroll(full)
  for (int i = 0; i < NUMBERS; i++) out[after + i] = T(number[i]);
}
