// Attention of one query row per sequence, first pass, for large groups of query heads: paged_decode by
// 8x8 matrices.
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
// template: T, D, GROUP (H / K), PARTS (simdgroups side by side, each with 8 heads of the group), BLOCKS
// (threadgroups that share the group), IS_QUANTISED. One threadgroup per (kv head and block, partition):
// grid (32 * TURNS * PARTS * SPLIT, K * BLOCKS, W). Four simdgroups (or two) take keys in turns, 16 at a
// time; two share the dimensions where D > 192: 256 take 134 registers of a thread, and an M1 or M2 has 128.
//
//   scores (8 keys, 8 heads)  =  keys   (8 keys, 8 dims)  x  queries (8 dims, 8 heads)
//   sums   (8 dims, 8 heads)  +=  values (8 dims, 8 keys)  x  weights (8 keys, 8 heads)
//
// So a lane's scores, weights and sums belong to the same two heads, and weights are never moved. A matrix
// is two neighbours of a row in each lane; MLX's own kernels rely on which. Loads fill matrices in the order
// of dimensions that they like: both factors have the same one. A quantised key's scale multiplies its
// scores, a value's its weights. Values and weights are multiplied in float32, as paged_decode does.

constexpr int SPLIT = D > 192 ? 2 : 1;
constexpr int TURNS = PARTS * SPLIT > 2 ? 2 : 4;  // 256 threads at most
constexpr int DIMS = D / SPLIT;  // of a simdgroup
constexpr int KEYS = 16;  // at a time; divides every page size
constexpr int TILES = KEYS / 8;
constexpr int QUADS = DIMS / 16;  // loads of a key: four lanes, four dimensions each
constexpr int WIDTH = DIMS % 32 == 0 ? 4 : 2;  // dimensions of one load of a value
constexpr int BLOCK = 8 * WIDTH;  // of eight lanes
constexpr int LOADS = DIMS / BLOCK;
constexpr int STRIDE = D + 4;  // of a partial
constexpr int ROW = IS_QUANTISED ? D + 4 : D;  // elements of a row in the pools
typedef conditional_t<IS_QUANTISED != 0, char, T> Stored;
typedef vec<Stored, 4> KeyQuad;
typedef vec<Stored, WIDTH> Value;
typedef vec<T, 2> Pair;
typedef simdgroup_matrix<T, 8, 8> Matrix;

threadgroup float exchanged[SPLIT > 1 ? SPLIT * PARTS * TURNS * KEYS * 8 : 1];
threadgroup float highests[PARTS * TURNS * 8];
threadgroup float totals[PARTS * TURNS * 8];
threadgroup float sums[SPLIT * PARTS * TURNS * 8 * BLOCK];

const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int turn = simdgroup % TURNS;
const int part = simdgroup / TURNS % PARTS;
const int split = simdgroup / (TURNS * PARTS);
const int line = matrix_line(lane);
const int column = matrix_column(lane);
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
const int first_head = (block * PARTS + part) * 8;
const long first_row = long(sequence) * kv_heads * GROUP + kv_head * GROUP;
const device T* rows = queries + first_row * D;
const device T* one_row = rows + min(first_head + column, GROUP - 1) * D;
const device T* other_row = rows + min(first_head + column + 1, GROUP - 1) * D;
Matrix query[2 * QUADS];
FloatMatrix sum[LOADS * WIDTH];
Softmax<FloatPair> softmax = {FloatPair(LOWEST), FloatPair(0.0f)};
#pragma clang loop unroll(full)
for (int c = 0; c < 2 * QUADS; c++) {
  const int at = split * DIMS + c / 2 * 16 + line / 2 * 4 + c % 2 * 2 + line % 2;
  pair_of(query[c]) = Pair(one_row[at], other_row[at]);
}
#pragma clang loop unroll(full)
for (int c = 0; c < LOADS * WIDTH; c++) sum[c] = FloatMatrix(0.0f);

for (int first = first_key & ~(KEYS - 1); first < end_key; first += KEYS * TURNS) {
  const int key = first + KEYS * turn;
  if (SPLIT == 1 && key >= end_key) break;  // two that share dimensions meet at barriers
  // KEYS divides every page size: they are on one page.
  const long page = pages[min(key, end_key - 1) >> page_shift];
  const long tile = ((page * kv_heads + kv_head) << page_shift) + (key & page_mask);
  FloatMatrix product[TILES];
  FloatPair score[TILES];
  #pragma clang loop unroll(full)
  for (int k = 0; k < TILES; k++) {
    // Rows past the end hold anything, and so do their scores, which are replaced.
    const device Stored* row =
        (const device Stored*)k_pool + (tile + 8 * k + line) * ROW + split * DIMS + column * 2;
    product[k] = FloatMatrix(0.0f);
    #pragma clang loop unroll(full)
    for (int c = 0; c < QUADS; c++) {
      const KeyQuad quad = *(const device KeyQuad*)(row + c * 16);
      Matrix keys;
      pair_of(keys) = Pair(T(quad.x), T(quad.y));
      simdgroup_multiply_accumulate(product[k], keys, query[2 * c], product[k]);
      pair_of(keys) = Pair(T(quad.z), T(quad.w));
      simdgroup_multiply_accumulate(product[k], keys, query[2 * c + 1], product[k]);
    }
    score[k] = pair_of(product[k]);
  }
  if (SPLIT > 1) {
    threadgroup float* mine = exchanged + (simdgroup * TILES * 32 + lane) * 2;
    const int other = (1 - split) * TURNS * PARTS + simdgroup % (TURNS * PARTS);
    const threadgroup float* others = exchanged + (other * TILES * 32 + lane) * 2;
    #pragma clang loop unroll(full)
    for (int k = 0; k < TILES; k++) {
      mine[64 * k] = score[k].x;
      mine[64 * k + 1] = score[k].y;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    #pragma clang loop unroll(full)
    for (int k = 0; k < TILES; k++) score[k] += FloatPair(others[64 * k], others[64 * k + 1]);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next scores replace these
  }

  FloatPair next = softmax.highest;
  #pragma clang loop unroll(full)
  for (int k = 0; k < TILES; k++) {
    const int mine = key + 8 * k + line;
    const bool is_seen = mine >= first_key && mine < end_key;
    score[k] *= factor;
    if (IS_QUANTISED) score[k] *= row_scale<D>(k_pool, tile + 8 * k + line);
    score[k] = capped(score[k], cap);
    if (!is_seen) score[k] = FloatPair(LOWEST);
    next = max(next, score[k]);
  }
  softmax.rescale(FloatPair(column_max(next.x), column_max(next.y)), sum);

  #pragma clang loop unroll(full)
  for (int k = 0; k < TILES; k++) {
    FloatPair share = softmax.weigh(score[k]);
    if (IS_QUANTISED && key + 8 * k + line < end_key) {
      share *= row_scale<D>(v_pool, tile + 8 * k + line);
    }
    FloatMatrix weights;
    pair_of(weights) = share;
    const int one = key + 8 * k + column;
    const device Stored* row =
        (const device Stored*)v_pool + (tile + 8 * k + column) * ROW + split * DIMS + line * WIDTH;
    #pragma clang loop unroll(full)
    for (int c = 0; c < LOADS; c++) {
      // Zeros replace rows past the end, which may be NaN, and 0 * NaN is NaN.
      Value one_value = Value(Stored(0));
      Value other_value = Value(Stored(0));
      if (one < end_key) one_value = *(const device Value*)(row + c * BLOCK);
      if (one + 1 < end_key) other_value = *(const device Value*)(row + ROW + c * BLOCK);
      #pragma clang loop unroll(full)
      for (int i = 0; i < WIDTH; i++) {
        FloatMatrix values;
        pair_of(values) = FloatPair(float(one_value[i]), float(other_value[i]));
        simdgroup_multiply_accumulate(sum[c * WIDTH + i], values, weights, sum[c * WIDTH + i]);
      }
    }
  }
}

// Merge the turns' sums, each shrunk to the highest maximum, as many dimensions at a time as a load has.
const FloatPair total = FloatPair(column_sum(softmax.total.x), column_sum(softmax.total.y));
const int state = (part * TURNS + turn) * 8 + column;
if (line == 0 && split == 0) {
  highests[state] = softmax.highest.x;
  highests[state + 1] = softmax.highest.y;
  totals[state] = total.x;
  totals[state + 1] = total.y;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
FloatPair most = softmax.highest;
#pragma clang loop unroll(full)
for (int t = 0; t < TURNS; t++) {
  const threadgroup float* maximum = highests + (part * TURNS + t) * 8 + column;
  most = max(most, FloatPair(maximum[0], maximum[1]));
}
const FloatPair shrink = power_of_2(softmax.highest - most);
threadgroup float* part_sums = sums + (split * PARTS + part) * TURNS * 8 * BLOCK;
device float* part_partials = partials +
    (long(partition) * kv_heads * GROUP + kv_head * GROUP + first_head) * STRIDE;
#pragma clang loop unroll(full)
for (int c = 0; c < LOADS; c++) {
  threadgroup float* mine = part_sums + (turn * 8 + column) * BLOCK + line * WIDTH;
  #pragma clang loop unroll(full)
  for (int i = 0; i < WIDTH; i++) {
    const FloatPair shrunk = pair_of(sum[c * WIDTH + i]) * shrink;
    mine[i] = shrunk.x;
    mine[BLOCK + i] = shrunk.y;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = turn * 32 + lane; i < 8 * BLOCK; i += 32 * TURNS) {
    float merged = 0.0f;
    #pragma clang loop unroll(full)
    for (int t = 0; t < TURNS; t++) merged += part_sums[t * 8 * BLOCK + i];
    if (first_head + i / BLOCK < GROUP) {
      part_partials[i / BLOCK * STRIDE + split * DIMS + c * BLOCK + i % BLOCK] = merged;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the next dimensions replace these
}
if (turn == 0 && split == 0 && first_head + lane / 4 < GROUP) {
  const threadgroup float* maximum = highests + part * TURNS * 8 + lane / 4;
  const threadgroup float* weights = totals + part * TURNS * 8 + lane / 4;
  float highest_of_all = maximum[0];
  #pragma clang loop unroll(full)
  for (int t = 1; t < TURNS; t++) highest_of_all = max(highest_of_all, maximum[8 * t]);
  float weight = 0.0f;
  #pragma clang loop unroll(full)
  for (int t = 0; t < TURNS; t++) {
    weight += weights[8 * t] * power_of_2(maximum[8 * t] - highest_of_all);
  }
  const int i = lane % 4;
  part_partials[lane / 4 * STRIDE + D + i] = i == 0 ? highest_of_all : i == 1 ? weight : 0.0f;
}

if (thread_index_in_threadgroup < 8 && threadgroup_position_in_grid.y == 0 && partition == 0) {
  fence[thread_index_in_threadgroup] = 0;
}
