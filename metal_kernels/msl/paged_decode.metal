// Attention of one query row per sequence, first pass: every partition of a context alone.
//
// queries      (S, H, D)                       of type T
// k_pool, v_pool  (num_pages, K, page_size, D)    of type T; int8 and D + 4 where quantised
// page_tables  (S, max_pages) int32            entries past a sequence's last page may be anything
// partitions   (W, 4) int32                    sequence, first key, key after the last, unused
// numbers      (8) float                       factor of the scores, softcap * log2(e) or 0, ...
// after        (8) int32                       the last write's fence: bound, never read
// partials     (W, H, D + 4) float             out: sum of weighted values, then maximum, sum of
//                                              weights, 0, 0. Weights are 2^(score - maximum)
// fence        (8) int32                       out: bound by the next kernel that writes the pools
//
// template: T, D, GROUP (H / K), HEADS (of one simdgroup), PARTS (simdgroups that share the heads
// of a threadgroup), BLOCKS (threadgroups that share the group), IS_QUANTISED.
// One threadgroup per (kv head and block, partition): grid (32 * TURNS * PARTS, K * BLOCKS, W).
// Keys and values are read once for HEADS query heads. Four simdgroups (two where PARTS > 2) take
// keys in turns, four (or two) at a time; a lane holds the same few dimensions of queries, keys, values and
// sums. Loops over these arrays are unrolled, or they would be in memory and not in registers. A quantised
// key's scale multiplies its score, a value's its weight:
//
//   simdgroup   0    1    2    3    0    1   ...
//   keys       0-3  4-7  8-11 12-15 16-19 20-23 ...

constexpr int TURNS = PARTS > 2 ? 2 : 4;  // 256 threads at most
constexpr int KEYS = D > 256 ? 2 : 4;  // at a time, in registers
constexpr int WIDTH = D % 128 == 0 ? 4 : D % 64 == 0 ? 2 : 4;  // dimensions of one load
constexpr int LOADS = (D + 32 * WIDTH - 1) / (32 * WIDTH);
constexpr int STRIDE = D + 4;  // of a partial
constexpr int ROW = IS_QUANTISED ? D + 4 : D;  // elements of a row in the pools
typedef conditional_t<IS_QUANTISED != 0, char, T> Stored;
typedef vec<Stored, WIDTH> Loaded;
typedef vec<T, WIDTH> Query;
typedef vec<float, WIDTH> Floats;

const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int turn = simdgroup % TURNS;
const int part = simdgroup / TURNS;
const int kv_heads = k_pool_shape[1];
const int kv_head = int(threadgroup_position_in_grid.y) / BLOCKS;
const int block = int(threadgroup_position_in_grid.y) % BLOCKS;
const int partition = int(threadgroup_position_in_grid.z);
const int page_shift = ctz(k_pool_shape[2]);
const int page_mask = (1 << page_shift) - 1;

const int sequence = partitions[4 * partition];
const int first_key = partitions[4 * partition + 1];
const int end_key = partitions[4 * partition + 2];
const float factor = numbers[0];
const float cap = numbers[1];
const device int* pages = page_tables + long(sequence) * page_tables_shape[1];

// The heads of this simdgroup, numbered in the group. Those past the group's end repeat its last.
const int first_head = (block * PARTS + part) * HEADS;
Floats query[HEADS][LOADS], sum[HEADS][LOADS];
Softmax<float> softmax[HEADS];
#pragma clang loop unroll(full)
for (int h = 0; h < HEADS; h++) {
  const int head = kv_head * GROUP + min(first_head + h, GROUP - 1);
  const device T* row = queries + (long(sequence) * kv_heads * GROUP + head) * D;
  #pragma clang loop unroll(full)
  for (int c = 0; c < LOADS; c++) {
    const int at = (c * 32 + lane) * WIDTH;
    query[h][c] = Floats(0.0f);
    if (at < D) query[h][c] = Floats(*(const device Query*)(row + at)) * factor;
    sum[h][c] = Floats(0.0f);
  }
  softmax[h].highest = LOWEST;
  softmax[h].total = 0.0f;
}

for (int key = (first_key & ~(KEYS - 1)) + KEYS * turn; key < end_key; key += KEYS * TURNS) {
  // KEYS divides every page size: they are on one page.
  const long page = pages[key >> page_shift];
  const long tile = ((page * kv_heads + kv_head) << page_shift) + (key & page_mask);
  Loaded keys[KEYS][LOADS], values[KEYS][LOADS];
  float key_scale[KEYS], value_scale[KEYS];
  bool is_seen[KEYS];
  #pragma clang loop unroll(full)
  for (int k = 0; k < KEYS; k++) {
    is_seen[k] = key + k >= first_key && key + k < end_key;
    key_scale[k] = 0.0f;
    value_scale[k] = 0.0f;
    if (IS_QUANTISED && is_seen[k]) {
      key_scale[k] = row_scale<D>(k_pool, tile + k);
      value_scale[k] = row_scale<D>(v_pool, tile + k);
    }
    #pragma clang loop unroll(full)
    for (int c = 0; c < LOADS; c++) {
      const int at = (c * 32 + lane) * WIDTH;
      keys[k][c] = Loaded(Stored(0));
      values[k][c] = Loaded(Stored(0));
      // Rows past the end hold anything, NaN included, and 0 * NaN is NaN: they are not read.
      if (is_seen[k] && at < D) {
        keys[k][c] = *(const device Loaded*)(k_pool + (tile + k) * ROW + at);
        values[k][c] = *(const device Loaded*)(v_pool + (tile + k) * ROW + at);
      }
    }
  }
  #pragma clang loop unroll(full)
  for (int h = 0; h < HEADS; h++) {
    float score[KEYS];
    float next = softmax[h].highest;
    #pragma clang loop unroll(full)
    for (int k = 0; k < KEYS; k++) {
      float product = 0.0f;
      #pragma clang loop unroll(full)
      for (int c = 0; c < LOADS; c++) product += dot(query[h][c], Floats(keys[k][c]));
      product = simd_sum(product);
      if (IS_QUANTISED) product *= key_scale[k];
      product = capped(product, cap);
      score[k] = is_seen[k] ? product : LOWEST;
      next = max(next, score[k]);
    }
    const float shrink = softmax[h].raise(next);
    #pragma clang loop unroll(full)
    for (int c = 0; c < LOADS; c++) sum[h][c] *= shrink;
    #pragma clang loop unroll(full)
    for (int k = 0; k < KEYS; k++) {
      const float weight = softmax[h].weigh(score[k]);
      const float share = IS_QUANTISED ? weight * value_scale[k] : weight;
      #pragma clang loop unroll(full)
      for (int c = 0; c < LOADS; c++) sum[h][c] += share * Floats(values[k][c]);
    }
  }
}

// Merge the turns' sums, as many heads at a time as fit in threadgroup memory.
constexpr int FITTING = 24576 / (PARTS * TURNS * D * 4);
constexpr int ROUND = FITTING < HEADS ? FITTING : HEADS;
threadgroup float sums[PARTS * ROUND * TURNS * D];
threadgroup float highests[PARTS * HEADS * TURNS];
threadgroup float totals[PARTS * HEADS * TURNS];
#pragma clang loop unroll(full)
for (int h = 0; h < HEADS; h++) {
  if (lane == 0) {
    highests[(part * HEADS + h) * TURNS + turn] = softmax[h].highest;
    totals[(part * HEADS + h) * TURNS + turn] = softmax[h].total;
  }
}
#pragma clang loop unroll(full)
for (int round = 0; round < HEADS; round += ROUND) {
  #pragma clang loop unroll(full)
  for (int r = 0; r < ROUND && round + r < HEADS; r++) {
    #pragma clang loop unroll(full)
    for (int c = 0; c < LOADS; c++) {
      const int at = (c * 32 + lane) * WIDTH;
      #pragma clang loop unroll(full)
      for (int i = 0; i < WIDTH; i++) {
        if (at < D) sums[((part * ROUND + r) * TURNS + turn) * D + at + i] = sum[round + r][c][i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // The simdgroups of a part merge its heads in turns.
  for (int r = turn; r < ROUND && round + r < HEADS; r += TURNS) {
    const int head = first_head + round + r;
    if (head >= GROUP) continue;
    const threadgroup float* maximum = highests + (part * HEADS + round + r) * TURNS;
    const threadgroup float* weights = totals + (part * HEADS + round + r) * TURNS;
    float most = maximum[0];
    #pragma clang loop unroll(full)
    for (int t = 1; t < TURNS; t++) most = max(most, maximum[t]);
    device float* partial =
        partials + (long(partition) * kv_heads * GROUP + kv_head * GROUP + head) * STRIDE;
    for (int d = lane; d < D; d += 32) {
      float merged = 0.0f;
      #pragma clang loop unroll(full)
      for (int t = 0; t < TURNS; t++) {
        merged += sums[((part * ROUND + r) * TURNS + t) * D + d] * power_of_2(maximum[t] - most);
      }
      partial[d] = merged;
    }
    float weight = 0.0f;
    #pragma clang loop unroll(full)
    for (int t = 0; t < TURNS; t++) weight += weights[t] * power_of_2(maximum[t] - most);
    if (lane < 4) partial[D + lane] = lane == 0 ? most : lane == 1 ? weight : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

if (thread_index_in_threadgroup < 8 && threadgroup_position_in_grid.y == 0 && partition == 0) {
  fence[thread_index_in_threadgroup] = 0;
}
