// Rows of drafts through the state-space layer of Mamba 2: their outputs, or the states after them. A row's results equal
// bit by bit those of mlx-lm's kernel for that row alone: the same lanes hold the same numbers, and add them in the same
// order.
//
// x      (T, HEADS, DIM)
// dt     (T, HEADS) float
// A_log  (HEADS,)
// B      (T, GROUPS, STATE)
// C      (T, GROUPS, STATE)
// D      (HEADS,)
// state  (batch, HEADS, DIM, STATE)  of type S
// spans  (>= SEQUENCES, 3) int32: a state, the first of the rows that follow it, and their number
// out    (T, HEADS, DIM), or if KEEPS the states after the rows (SEQUENCES, HEADS, DIM, STATE)  of type T
//
// template: S, T, HEADS, GROUPS, DIM, STATE (a multiple of 32), KEEPS. A simdgroup has one number of a head's row and its
// STATE numbers in registers: grid (32, DIM, SEQUENCES * HEADS), eight simdgroups a threadgroup.

constexpr int NUMBERS = STATE / 32;  // of a lane

const int lane = int(thread_index_in_simdgroup);
const int value = int(thread_position_in_grid.y);
const int sequence = int(thread_position_in_grid.z) / HEADS;
const int head = int(thread_position_in_grid.z) % HEADS;
const int group = head / (HEADS / GROUPS);
const int source = spans[long(sequence) * 3];
const int first = spans[long(sequence) * 3 + 1];
const int end = first + spans[long(sequence) * 3 + 2];

const auto before = state + ((long(source) * HEADS + head) * DIM + value) * STATE + lane * NUMBERS;
float number[NUMBERS];
#pragma clang loop unroll(full)
for (int i = 0; i < NUMBERS; i++) number[i] = float(before[i]);

const float decay = -fast::exp(float(A_log[head]));
for (long row = first; row < end; row++) {
  const auto own_B = B + (row * GROUPS + group) * STATE + lane * NUMBERS;
  const auto own_C = C + (row * GROUPS + group) * STATE + lane * NUMBERS;
  const float step = float(dt[row * HEADS + head]);
  const float kept = fast::exp(decay * step);
  const float input = float(x[(row * HEADS + head) * DIM + value]);
  float sum = 0.0f;
  #pragma clang loop unroll(full)
  for (int i = 0; i < NUMBERS; i++) {
    const float added = input * step * float(own_B[i]);
    number[i] = kept * number[i] + added;
    sum += number[i] * float(own_C[i]);
    // As if it had been stored after the row.
    number[i] = float(S(number[i]));
  }
  if (!KEEPS) {
    sum = simd_sum(sum);
    if (lane == 0) out[(row * HEADS + head) * DIM + value] = T(sum + input * float(D[head]));
  }
}

if (KEEPS) {
  const auto after = out + ((long(sequence) * HEADS + head) * DIM + value) * STATE + lane * NUMBERS;
  #pragma clang loop unroll(full)
  for (int i = 0; i < NUMBERS; i++) after[i] = T(number[i]);
}
