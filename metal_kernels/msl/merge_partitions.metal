// Attention of one query row per sequence, second pass: merge a context's partitions.
//
// partials  (W, H, D + 4) float    of paged_decode: weighted sum, maximum, sum of weights
// starts    (S + 1) int32          sequence s owns partitions starts[s] up to starts[s + 1]
// sinks     (H)                    a logit per head that is only in the softmax's sum
// numbers   (8) float              ..., ..., 1 where there are sinks
// out       (S, H, D)              of type T
//
// template: T, D. One threadgroup per (head, sequence): grid (128, H, S). Four simdgroups take
// partitions in turns; each has seen all maximums.

constexpr int TURNS = 4;
constexpr int STRIDE = D + 4;
constexpr int LOADS = (D + 31) / 32;

threadgroup float sums[TURNS * D];
threadgroup float totals[TURNS];

const int lane = int(thread_index_in_simdgroup);
const int turn = int(simdgroup_index_in_threadgroup);
const int head = int(threadgroup_position_in_grid.y);
const int heads = int(threadgroups_per_grid.y);
const int sequence = int(threadgroup_position_in_grid.z);
const int first = starts[sequence];
const int end = starts[sequence + 1];

const float sink = numbers[2] > 0.0f ? float(sinks[head]) * LOG2_E : LOWEST;
float highest = sink;
for (int p = first + lane; p < end; p += 32) {
  highest = max(highest, partials[(long(p) * heads + head) * STRIDE + D]);
}
highest = simd_max(highest);

float total = 0.0f;
float sum[LOADS];
#pragma clang loop unroll(full)
for (int c = 0; c < LOADS; c++) sum[c] = 0.0f;
for (int p = first + turn; p < end; p += TURNS) {
  const device float* partial = partials + (long(p) * heads + head) * STRIDE;
  const float factor = power_of_2(partial[D] - highest);
  total += partial[D + 1] * factor;
  #pragma clang loop unroll(full)
  for (int c = 0; c < LOADS; c++) {
    const int d = c * 32 + lane;
    if (d < D) sum[c] += partial[d] * factor;
  }
}
#pragma clang loop unroll(full)
for (int c = 0; c < LOADS; c++) {
  const int d = c * 32 + lane;
  if (d < D) sums[turn * D + d] = sum[c];
}
if (lane == 0) totals[turn] = total;
threadgroup_barrier(mem_flags::mem_threadgroup);

float whole = power_of_2(sink - highest);
#pragma clang loop unroll(full)
for (int t = 0; t < TURNS; t++) whole += totals[t];
for (int d = int(thread_index_in_threadgroup); d < D; d += 32 * TURNS) {
  float merged = 0.0f;
  #pragma clang loop unroll(full)
  for (int t = 0; t < TURNS; t++) merged += sums[t * D + d];
  out[(long(sequence) * heads + head) * D + d] = T(merged / whole);
}
