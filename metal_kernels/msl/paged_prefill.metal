// Attention of chunks over pages, by tiles of 8x8 matrices: causal, but for rows that see up to their end.
//
// queries      (T, H, D)                       of type T; each chunk's rows are consecutive
// k_pool, v_pool  (num_pages, K, page_size, D)    of type T; int8 and D + 4 where quantised
// page_tables  (S, max_pages) int32            entries past a sequence's last page may be anything
// tiles        (W, 8) int32                    sequence, first query row of the chunk, first line,
//                                              lines of the chunk, position of the chunk's first
//                                              row, first key, key after the last, window
// ends         (T) int32                       position after the last one that each row sees, where
//                                              HAS_ENDS: else bound, never read
// numbers      (8) float                       factor of the scores, softcap * log2(e) or 0,
//                                              1 where there are sinks
// sinks        (H)                             a logit per head, for the softmax's sum only
// after        (8) int32                       the last write's fence: bound, never read
// out          (T, H, D)                       of type T
// fence        (8) int32                       out: bound by the next kernel that writes the pools
//
// template: T, D, SIDE (lines and keys of a tile: 8, 16 or 32), TILES (1, or 2 where keys and values have
// memory of their own), IS_QUANTISED, HAS_ENDS. Grid (4 * SIDE * SPLIT, K, W): one threadgroup per (kv head, tile),
// SPLIT simdgroups per 8 lines, each with its part of the dimensions in registers. A line is one head of
// one query row, so that all heads of a group share the keys and values they read:
//
//   line     0  1 .. G-1 | G .. 2G-1 | ...
//   row      0           | 1         |          G = H / K heads of the group
//
// A matrix is two neighbours of a row in each lane; MLX's own kernels rely on which. So scores become
// weights in registers, and sums are only shrunk where a maximum grew. With two tiles a simdgroup may
// stage values while others still multiply keys, and the next keys while others multiply values:
//
//   stage keys |barrier| multiply, stage values |barrier| multiply, stage the next keys |barrier| ...

constexpr int SPLIT = D > 192 ? 2 : 1;
constexpr int DIMS = D / SPLIT;  // of a simdgroup
constexpr int BLOCKS = SIDE / 8;  // of 8 keys
constexpr int THREADS = SIDE * 4 * SPLIT;
constexpr int QUADS = D / 4;
constexpr int TILE_STRIDE = D + 16 / int(sizeof(T));  // in elements; 16 bytes more than a row
constexpr int SCORE_STRIDE = SIDE + 4;
typedef vec<T, 4> Quad;
typedef vec<T, 2> Pair;
typedef simdgroup_matrix<T, 8, 8> Matrix;

// Queries, then keys and values: in turn, or side by side.
threadgroup Quad tile_quads[TILES * SIDE * TILE_STRIDE / 4];
threadgroup float scores[SPLIT > 1 ? SPLIT * SIDE * SCORE_STRIDE : 1];  // of each part of the dimensions

const int thread_index = int(thread_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup) / SPLIT;  // of the lines
const int part = int(simdgroup_index_in_threadgroup) % SPLIT;       // of the dimensions
const int heads = queries_shape[1];
const int kv_heads = k_pool_shape[1];
const int group = heads / kv_heads;
const int kv_head = int(threadgroup_position_in_grid.y);
const int page_shift = ctz(k_pool_shape[2]);
const int page_mask = (1 << page_shift) - 1;

const device int* tile = tiles + 8 * threadgroup_position_in_grid.z;
const int first_row = tile[1];
const int first_line = tile[2];
const int num_lines = tile[3];
const int position = tile[4];
const int end_key = tile[6];
const int window = tile[7];
const float factor = numbers[0];
const float cap = numbers[1];
const device int* pages = page_tables + long(tile[0]) * page_tables_shape[1];
threadgroup T* my_keys = (threadgroup T*)tile_quads + part * DIMS;
threadgroup Quad* value_quads = tile_quads + (TILES - 1) * SIDE * TILE_STRIDE / 4;
threadgroup T* my_values = (threadgroup T*)value_quads + part * DIMS;

for (int i = thread_index; i < SIDE * QUADS; i += THREADS) {
  const int line = first_line + i / QUADS;
  Quad quad = Quad(T(0));
  if (line < num_lines) {
    const long row = first_row + line / group;
    const int head = kv_head * group + line % group;
    quad = ((const device Quad*)(queries + (row * heads + head) * D))[i % QUADS];
  }
  tile_quads[i / QUADS * (TILE_STRIDE / 4) + i % QUADS] = quad;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
Matrix query[DIMS / 8];
FloatMatrix sum[DIMS / 8];
#pragma clang loop unroll(full)
for (int c = 0; c < DIMS / 8; c++) {
  simdgroup_load(query[c], my_keys + simdgroup * 8 * TILE_STRIDE + c * 8, TILE_STRIDE);
  sum[c] = FloatMatrix(0.0f);
}
threadgroup_barrier(mem_flags::mem_threadgroup);  // keys replace the queries

// Four lanes hold the state of a line's softmax, and agree on it.
const int my_line = matrix_line(lane);
const int my_column = matrix_column(lane);
const int line = first_line + simdgroup * 8 + my_line;
const int my_position = position + line / group;
// Positions after its own that the line sees. Lines past the last one see nothing more: their row has no end.
const int ahead = HAS_ENDS && line < num_lines ? ends[first_row + line / group] - 1 - my_position : 0;
const int my_head = kv_head * group + line % group;
// In `scores`, where two parts of the dimensions are added.
const int my_scores = (part * SIDE + simdgroup * 8) * SCORE_STRIDE;
const int other_scores =
    ((SPLIT - 1 - part) * SIDE + simdgroup * 8 + my_line) * SCORE_STRIDE + my_column;
// A sink is the first score of a line. Without sinks its placeholder weighs nothing as soon as a key
// is seen.
Softmax<float> softmax = {
    numbers[2] > 0.0f ? float(sinks[my_head]) * LOG2_E : LOWEST,
    my_column == 0 ? 1.0f : 0.0f,  // of this lane's columns
};

for (int first_key = tile[5]; first_key < end_key; first_key += SIDE) {
  // Rows past the end hold anything, NaN included, and 0 * NaN is NaN: zeros replace them.
  for (int i = thread_index; i < SIDE * QUADS; i += THREADS) {
    const int key = first_key + i / QUADS;
    Quad quad = Quad(T(0));
    if (key < end_key) {
      const long page = pages[key >> page_shift];
      const long slot = ((page * kv_heads + kv_head) << page_shift) + (key & page_mask);
      quad = row_quad<T, D, IS_QUANTISED>(k_pool, slot, i % QUADS);
    }
    tile_quads[i / QUADS * (TILE_STRIDE / 4) + i % QUADS] = quad;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  FloatPair score[BLOCKS];
  #pragma clang loop unroll(full)
  for (int k = 0; k < BLOCKS; k++) {
    FloatMatrix product = FloatMatrix(0.0f);
    #pragma clang loop unroll(full)
    for (int c = 0; c < DIMS / 8; c++) {
      Matrix keys;
      simdgroup_load(keys, my_keys + k * 8 * TILE_STRIDE + c * 8, TILE_STRIDE, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(product, query[c], keys, product);
    }
    if (SPLIT > 1) simdgroup_store(product, scores + my_scores + k * 8, SCORE_STRIDE);
    score[k] = pair_of(product);
  }
  if (TILES == 1) threadgroup_barrier(mem_flags::mem_threadgroup);  // values replace the keys

  for (int i = thread_index; i < SIDE * QUADS; i += THREADS) {
    const int key = first_key + i / QUADS;
    Quad quad = Quad(T(0));
    if (key < end_key) {
      const long page = pages[key >> page_shift];
      const long slot = ((page * kv_heads + kv_head) << page_shift) + (key & page_mask);
      quad = row_quad<T, D, IS_QUANTISED>(v_pool, slot, i % QUADS);
    }
    value_quads[i / QUADS * (TILE_STRIDE / 4) + i % QUADS] = quad;
  }
  float next = softmax.highest;
  #pragma clang loop unroll(full)
  for (int k = 0; k < BLOCKS; k++) {
    if (SPLIT > 1) {
      score[k] += FloatPair(scores[other_scores + k * 8], scores[other_scores + k * 8 + 1]);
    }
    score[k] *= factor;
    score[k] = capped(score[k], cap);
    const int distance = my_position - (first_key + k * 8 + my_column);
    if (distance < -ahead || distance >= window) score[k].x = LOWEST;
    if (distance < 1 - ahead || distance > window) score[k].y = LOWEST;
    next = max(next, max(score[k].x, score[k].y));
  }
  softmax.rescale(line_max(next), sum);
  Matrix weights[BLOCKS];
  #pragma clang loop unroll(full)
  for (int k = 0; k < BLOCKS; k++) {
    // A line that has seen no key yet gives all weights 1; the first key's shrink clears them.
    const FloatPair weight = softmax.weigh_both(score[k]);
    pair_of(weights[k]) = Pair(T(weight.x), T(weight.y));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // values are complete; the next keys may follow

  #pragma clang loop unroll(full)
  for (int c = 0; c < DIMS / 8; c++) {
    #pragma clang loop unroll(full)
    for (int k = 0; k < BLOCKS; k++) {
      Matrix values;
      simdgroup_load(values, my_values + k * 8 * TILE_STRIDE + c * 8, TILE_STRIDE);
      simdgroup_multiply_accumulate(sum[c], weights[k], values, sum[c]);
    }
  }
  if (TILES == 1) threadgroup_barrier(mem_flags::mem_threadgroup);  // keys replace the values
}

// Each line divided by its total.
const float total = line_sum(softmax.total);
if (line < num_lines) {
  const long row = first_row + line / group;
  device Pair* my_out = (device Pair*)(out + (row * heads + my_head) * D + part * DIMS + my_column);
  #pragma clang loop unroll(full)
  for (int c = 0; c < DIMS / 8; c++) {
    const FloatPair sums = pair_of(sum[c]);
    my_out[c * 4] = Pair(T(sums.x / total), T(sums.y / total));
  }
}

if (thread_index < 8 && kv_head == 0 && threadgroup_position_in_grid.z == 0) {
  fence[thread_index] = 0;
}
