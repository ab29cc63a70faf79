// Attention of the rows of drafts, first pass: rows of one sequence read their keys and values together. Each row's
// partials equal bit by bit those of paged_decode for that row alone: the same keys in the same turns, added in the
// same order. merge_partitions is the second pass.
//
// queries      (S, H, D)                       of type T; S rows, those of a draft one after another
// k_pool, v_pool  (num_pages, K, page_size, D)    of type T; int8 and D + 4 where quantised
// page_tables  (S, max_pages) int32            entries past a row's last page may be anything
// partitions   (W, 4) int32                    row, first key, key after the last, unused
// units        (U, ROWS) int32                 partitions that are read together, of rows in ascending order; -1 for
//                                              none, before the others. Keys of all are on the last row's pages
// numbers      (8) float                       factor of the scores, softcap * log2(e) or 0, ...
// after        (8) int32                       the last write's fence: bound, never read
// partials     (W, H, D + 4) float             out: sum of weighted values, then maximum, sum of
//                                              weights, 0, 0. Weights are 2^(score - maximum)
// fence        (8) int32                       out: bound by the next kernel that writes the pools
//
// template: T, D, GROUP (H / K), ROWS, HEADS (of one simdgroup, of any of the rows), PARTS (1 or 2 simdgroups that
// share the heads of all rows), IS_QUANTISED. One threadgroup per (kv head, unit): grid (32 * TURNS * PARTS, K, U).
// What a simdgroup and a lane do is told in paged_decode; here a head is one of one row, and has its own last key.

constexpr int LINES = ROWS * GROUP;  // heads of all rows
constexpr int TURNS = 4;  // as paged_decode has with one or two parts
constexpr int KEYS = 4;  // at a time, in registers
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
const int kv_head = int(threadgroup_position_in_grid.y);
const device int* unit = units + int(threadgroup_position_in_grid.z) * ROWS;
const int page_shift = ctz(k_pool_shape[2]);
const int page_mask = (1 << page_shift) - 1;

// The last row's, which is never none, but in padding. All begin in the same KEYS.
const int last = max(unit[ROWS - 1], 0);
const long sequence = partitions[4 * last];
const int first_key = partitions[4 * last + 1];
const int end_key = unit[ROWS - 1] < 0 ? 0 : partitions[4 * last + 2];
const float factor = numbers[0];
const float cap = numbers[1];
const device int* pages = page_tables + sequence * page_tables_shape[1];

// The heads of this simdgroup. Those past the last row's end repeat its last, those of no row the last row's.
const int first_line = part * HEADS;
Floats query[HEADS][LOADS], sum[HEADS][LOADS];
Softmax<float> softmax[HEADS];
int begin[HEADS], end[HEADS];
#pragma clang loop unroll(full)
for (int h = 0; h < HEADS; h++) {
  const int line = min(first_line + h, LINES - 1);
  const int own = unit[line / GROUP];
  const int listed = own < 0 ? last : own;
  begin[h] = partitions[4 * listed + 1];
  end[h] = own < 0 ? 0 : partitions[4 * listed + 2];
  const long source = partitions[4 * listed];
  const device T* row = queries + (source * kv_heads * GROUP + kv_head * GROUP + line % GROUP) * D;
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
  #pragma clang loop unroll(full)
  for (int k = 0; k < KEYS; k++) {
    key_scale[k] = 0.0f;
    value_scale[k] = 0.0f;
    if (IS_QUANTISED) {
      key_scale[k] = row_scale<D>(k_pool, tile + k);
      value_scale[k] = row_scale<D>(v_pool, tile + k);
    }
    #pragma clang loop unroll(full)
    for (int c = 0; c < LOADS; c++) {
      const int at = (c * 32 + lane) * WIDTH;
      keys[k][c] = Loaded(Stored(0));
      values[k][c] = Loaded(Stored(0));
      // Those past a row's end are not used for it: they hold anything, NaN included, and 0 * NaN is NaN.
      if (at < D) {
        keys[k][c] = *(const device Loaded*)(k_pool + (tile + k) * ROW + at);
        values[k][c] = *(const device Loaded*)(v_pool + (tile + k) * ROW + at);
      }
    }
  }
  #pragma clang loop unroll(full)
  for (int h = 0; h < HEADS; h++) {
    // Alone it would not have come so far.
    if (key >= end[h]) continue;
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
      score[k] = key + k >= begin[h] && key + k < end[h] ? product : LOWEST;
      next = max(next, score[k]);
    }
    const float shrink = softmax[h].raise(next);
    #pragma clang loop unroll(full)
    for (int c = 0; c < LOADS; c++) sum[h][c] *= shrink;
    #pragma clang loop unroll(full)
    for (int k = 0; k < KEYS; k++) {
      const float weight = softmax[h].weigh(score[k]);
      const float share = IS_QUANTISED ? weight * value_scale[k] : weight;
      // A value that the row does not see may be infinite, and 0 * infinity is NaN.
      if (key + k < begin[h] || key + k >= end[h]) continue;
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
    const int line = first_line + round + r;
    if (line >= LINES || unit[line / GROUP] < 0) continue;
    const long partition = unit[line / GROUP];
    const threadgroup float* maximum = highests + (part * HEADS + round + r) * TURNS;
    const threadgroup float* weights = totals + (part * HEADS + round + r) * TURNS;
    float most = maximum[0];
    #pragma clang loop unroll(full)
    for (int t = 1; t < TURNS; t++) most = max(most, maximum[t]);
    device float* partial =
        partials + (partition * kv_heads * GROUP + kv_head * GROUP + line % GROUP) * STRIDE;
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

if (thread_index_in_threadgroup < 8 && kv_head == 0 && threadgroup_position_in_grid.z == 0) {
  fence[thread_index_in_threadgroup] = 0;
}
