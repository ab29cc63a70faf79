// Rows of drafts through a gated delta net: their outputs, or the states after them. A row's results equal bit by bit
// those of mlx-lm's kernel for that row alone: the same lanes hold the same numbers, and add them in the same order.
//
// q      (T, HK, DK)
// k      (T, HK, DK)
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
constexpr int STRIDE = GATES ? DK : 1;  // of the gates
// mlx-lm has a kernel of its own for these, which writes the order of its sums out.
constexpr bool IS_PACKED = DK == 128 && DV % 8 == 0 && !GATES && sizeof(S) == 4;

const int lane = int(thread_index_in_simdgroup);
const int value = int(thread_position_in_grid.y);
const int sequence = int(thread_position_in_grid.z) / HV;
const int head = int(thread_position_in_grid.z) % HV;
const int key_head = head / (HV / HK);
const int source = spans[long(sequence) * 3];
const int first = spans[long(sequence) * 3 + 1];
const int end = first + spans[long(sequence) * 3 + 2];

const auto before = state + ((long(source) * HV + head) * DV + value) * DK + lane * NUMBERS;
float number[NUMBERS];
#pragma clang loop unroll(full)
for (int i = 0; i < NUMBERS; i++) number[i] = float(before[i]);

for (long row = first; row < end; row++) {
  const auto key = k + (row * HK + key_head) * DK + lane * NUMBERS;
  const auto query = q + (row * HK + key_head) * DK + lane * NUMBERS;
  const auto gate = g + (row * HV + head) * STRIDE;
  float held = 0.0f;
  #pragma clang loop unroll(full)
  for (int i = 0; i < NUMBERS; i++) {
    number[i] = number[i] * float(gate[GATES ? lane * NUMBERS + i : 0]);
    held += number[i] * float(key[i]);
  }
  if (IS_PACKED) {
    #pragma clang loop unroll(full)
    for (ushort apart = 1; apart < 32; apart *= 2) held += simd_shuffle_xor(held, apart);
  } else {
    held = simd_sum(held);
  }
  const float delta = (float(v[(row * HV + head) * DV + value]) - held) * float(beta[row * HV + head]);
  float sum = 0.0f;
  #pragma clang loop unroll(full)
  for (int i = 0; i < NUMBERS; i++) {
    number[i] = number[i] + float(key[i]) * delta;
    sum += number[i] * float(query[i]);
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
    if (lane == 0) out[(row * HV + head) * DV + value] = T(sum);
  }
}

if (KEEPS) {
  const auto after = out + ((long(sequence) * HV + head) * DV + value) * DK + lane * NUMBERS;
  #pragma clang loop unroll(full)
  for (int i = 0; i < NUMBERS; i++) after[i] = T(number[i]);
}
