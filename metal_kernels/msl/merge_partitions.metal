// Attention of one query row per sequence, second pass: merge a context's partitions.
//
// partials  (W, H, D + 4) float    of paged_decode: weighted sum, maximum, sum of weights
// starts    (S + 1) int32          sequence s owns partitions starts[s] up to starts[s + 1]
// sinks     (H)                    a logit per head that is only in the softmax's sum
// numbers   (8) float              ..., ..., 1 where there are sinks
// out       (S, H, D)              of type T
//
// template: T, D. One simdgroup per (head, sequence): grid (32, H, S).

constexpr int STRIDE = D + 4;
constexpr float LOWEST = -1e30f;
constexpr float LOG2_E = 1.44269504088896340736f;
constexpr int LOADS = (D + 31) / 32;

const int lane = int(thread_index_in_simdgroup);
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

float total = fast::exp2(sink - highest);
float sum[LOADS];
for (int c = 0; c < LOADS; c++) sum[c] = 0.0f;
for (int p = first; p < end; p++) {
  const device float* partial = partials + (long(p) * heads + head) * STRIDE;
  const float factor = fast::exp2(partial[D] - highest);
  total += partial[D + 1] * factor;
  for (int c = 0; c < LOADS; c++) {
    const int d = c * 32 + lane;
    if (d < D) sum[c] += partial[d] * factor;
  }
}
for (int c = 0; c < LOADS; c++) {
  const int d = c * 32 + lane;
  if (d < D) out[(long(sequence) * heads + head) * D + d] = T(sum[c] / total);
}
