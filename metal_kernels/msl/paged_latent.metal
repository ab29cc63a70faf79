// Causal attention over latents (MLA), which are keys and values at once, by tiles of 8x8 matrices.
//
// q_latent     (T, H, LATENT)                  of type T, not scaled
// q_rope       (T, H, ROPE)                    of type T, scaled
// k_pool       (num_pages, 1, page_size, LATENT)  latents
// v_pool       (num_pages, 1, page_size, ROPE)    rotated keys
// page_tables  (S, max_pages) int32            entries past a sequence's last page may be anything
// tiles        (W, 8) int32                    sequence, the chunk's first line in the queries, first
//                                              line of the tile in the chunk, lines of the chunk,
//                                              position of the chunk's first row, first key (a
//                                              multiple of KEYS), key after the last, the chunk's
//                                              first line in `out`
// numbers      (8) float                       scale of the latents' scores, ...
// after        (8) int32                       the last write's fence: bound, never read
// out          (lines, LATENT) of type O; partial: (lines, LATENT + 4) float, sum of weighted values,
//              then maximum, sum of weights, 0, 0. Weights are 2^(score - maximum)
// fence        (8) int32                       out: bound by the next kernel that writes the pools
//
// template: T, O, LATENT, ROPE, KEYS (of a tile, a multiple of 8), IS_PARTIAL. Grid
// (4 * lines * SPLIT, 1, W), at most 32 lines, a multiple of 8: one threadgroup per tile, SPLIT
// simdgroups per 8 lines, each with its part of the dimensions in registers. A line is one head of
// one query row, and all heads share their latents, so the queries of a chunk are lines side by side
// in memory:
//
//   line     0  1 .. H-1 | H .. 2H-1 | ...
//   row      0           | 1         |
//
// A matrix is two neighbours of a row in each lane; MLX's own kernels rely on which. So scores become
// weights in registers, and sums are only shrunk where a maximum grew.
// A chunk sees keys 0 up to its own rows. A decode (a chunk of one row) is cut into partitions,
// which merge_partitions puts together.

constexpr int SPLIT = LATENT > 256 ? 2 : 1;
constexpr int DIMS = LATENT / SPLIT;  // of a simdgroup
constexpr int ROPE_DIMS = ROPE / SPLIT;
constexpr int LINES = 32;  // at most
constexpr int LATENT_QUADS = LATENT / 4;
constexpr int QUADS = LATENT_QUADS + ROPE / 4;
constexpr int TILE_STRIDE = LATENT + ROPE + 16 / int(sizeof(T));  // 16 bytes more than a row
constexpr int SCORE_STRIDE = KEYS + 4;
constexpr int BLOCKS = KEYS / 8;  // of 8 keys
constexpr int OUT_STRIDE = IS_PARTIAL ? LATENT + 4 : LATENT;
typedef vec<T, 4> Quad;
typedef vec<T, 2> Pair;
typedef simdgroup_matrix<T, 8, 8> Matrix;

threadgroup Quad tile_quads[KEYS * TILE_STRIDE / 4];  // queries, then keys: latents | rotated
threadgroup float scores[SPLIT > 1 ? SPLIT * LINES * SCORE_STRIDE : 1];  // of each part of the dimensions

const int thread_index = int(thread_index_in_threadgroup);
const int num_threads = int(threads_per_threadgroup.x);
const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup) / SPLIT;  // of the lines
const int part = int(simdgroup_index_in_threadgroup) % SPLIT;       // of the dimensions
const int heads = q_latent_shape[1];
const int page_shift = ctz(k_pool_shape[2]);
const int page_mask = (1 << page_shift) - 1;

const device int* tile = tiles + 8 * threadgroup_position_in_grid.z;
const long first_query = tile[1];
const int first_line = tile[2];
const int num_lines = tile[3];
const int position = tile[4];
const int end_key = tile[6];
const long first_out = tile[7];
const device int* pages = page_tables + long(tile[0]) * page_tables_shape[1];
threadgroup T* staged = (threadgroup T*)tile_quads;
threadgroup T* my_dims = staged + part * DIMS;
threadgroup T* my_rope_dims = staged + LATENT + part * ROPE_DIMS;

Matrix query[DIMS / 8], rope_query[ROPE_DIMS / 8];
FloatMatrix sum[DIMS / 8];
#pragma clang loop unroll(full)
for (int c = 0; c < DIMS / 8; c++) sum[c] = FloatMatrix(0.0f);
// The tile's memory takes as many queries at a time as keys.
for (int round = 0; round * KEYS < num_threads / (4 * SPLIT); round++) {
  for (int i = thread_index; i < KEYS * QUADS; i += num_threads) {
    const int line = first_line + round * KEYS + i / QUADS;
    const int at = i % QUADS;
    Quad quad = Quad(T(0));
    if (line < num_lines) {
      const long row = first_query + line;
      quad = at < LATENT_QUADS ? ((const device Quad*)(q_latent + row * LATENT))[at]
                               : ((const device Quad*)(q_rope + row * ROPE))[at - LATENT_QUADS];
    }
    tile_quads[i / QUADS * (TILE_STRIDE / 4) + at] = quad;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup * 8 / KEYS == round) {
    const int row = simdgroup * 8 % KEYS * TILE_STRIDE;
    #pragma clang loop unroll(full)
    for (int c = 0; c < DIMS / 8; c++) {
      simdgroup_load(query[c], my_dims + row + c * 8, TILE_STRIDE);
    }
    #pragma clang loop unroll(full)
    for (int c = 0; c < ROPE_DIMS / 8; c++) {
      simdgroup_load(rope_query[c], my_rope_dims + row + c * 8, TILE_STRIDE);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the next queries, or keys, replace these
}

// Four lanes hold the state of a line's softmax, and agree on it.
const int my_line = matrix_line(lane);
const int my_column = matrix_column(lane);
const int line = first_line + simdgroup * 8 + my_line;
const int my_position = position + line / heads;
// In `scores`, where two parts of the dimensions are added.
const int my_scores = (part * LINES + simdgroup * 8) * SCORE_STRIDE;
const int other_scores =
    ((SPLIT - 1 - part) * LINES + simdgroup * 8 + my_line) * SCORE_STRIDE + my_column;
const float scale = numbers[0];
Softmax<float> softmax = {LOWEST, 0.0f};  // the total is that of this lane's columns

for (int first_key = tile[5]; first_key < end_key; first_key += KEYS) {
  // Rows past the end hold anything, NaN included, and 0 * NaN is NaN: zeros replace them.
  for (int i = thread_index; i < KEYS * QUADS; i += num_threads) {
    const int key = first_key + i / QUADS;
    const int at = i % QUADS;
    Quad quad = Quad(T(0));
    if (key < end_key) {
      const long page = pages[key >> page_shift];
      const long slot = (page << page_shift) + (key & page_mask);
      quad = at < LATENT_QUADS ? ((const device Quad*)(k_pool + slot * LATENT))[at]
                               : ((const device Quad*)(v_pool + slot * ROPE))[at - LATENT_QUADS];
    }
    tile_quads[i / QUADS * (TILE_STRIDE / 4) + at] = quad;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  FloatPair score[BLOCKS];
  #pragma clang loop unroll(full)
  for (int k = 0; k < BLOCKS; k++) {
    FloatMatrix product = FloatMatrix(0.0f);
    Matrix keys;
    #pragma clang loop unroll(full)
    for (int c = 0; c < DIMS / 8; c++) {
      simdgroup_load(keys, my_dims + k * 8 * TILE_STRIDE + c * 8, TILE_STRIDE, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(product, query[c], keys, product);
    }
    // Scaled in float32. The rotated queries come scaled.
    pair_of(product) *= scale;
    #pragma clang loop unroll(full)
    for (int c = 0; c < ROPE_DIMS / 8; c++) {
      simdgroup_load(
          keys, my_rope_dims + k * 8 * TILE_STRIDE + c * 8, TILE_STRIDE, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(product, rope_query[c], keys, product);
    }
    if (SPLIT > 1) simdgroup_store(product, scores + my_scores + k * 8, SCORE_STRIDE);
    score[k] = pair_of(product);
  }
  if (SPLIT > 1) threadgroup_barrier(mem_flags::mem_threadgroup);  // the scores of all parts are complete

  float next = softmax.highest;
  #pragma clang loop unroll(full)
  for (int k = 0; k < BLOCKS; k++) {
    if (SPLIT > 1) {
      score[k] += FloatPair(scores[other_scores + k * 8], scores[other_scores + k * 8 + 1]);
    }
    score[k] *= LOG2_E;
    const int key = first_key + k * 8 + my_column;
    if (key > my_position) score[k].x = LOWEST;
    if (key + 1 > my_position) score[k].y = LOWEST;
    next = max(next, max(score[k].x, score[k].y));
  }
  softmax.rescale(line_max(next), sum);
  Matrix weights[BLOCKS];
  #pragma clang loop unroll(full)
  for (int k = 0; k < BLOCKS; k++) {
    const FloatPair weight = softmax.weigh_both(score[k]);
    pair_of(weights[k]) = Pair(T(weight.x), T(weight.y));
  }
  #pragma clang loop unroll(full)
  for (int c = 0; c < DIMS / 8; c++) {
    #pragma clang loop unroll(full)
    for (int k = 0; k < BLOCKS; k++) {
      Matrix values;
      simdgroup_load(values, my_dims + k * 8 * TILE_STRIDE + c * 8, TILE_STRIDE);
      simdgroup_multiply_accumulate(sum[c], weights[k], values, sum[c]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the next keys replace these
}

// Each line, divided by its total or partial.
const float total = line_sum(softmax.total);
if (line < num_lines) {
  const float divisor = IS_PARTIAL ? 1.0f : total;
  device O* my_out = out + (first_out + line) * OUT_STRIDE;
  #pragma clang loop unroll(full)
  for (int c = 0; c < DIMS / 8; c++) {
    const FloatPair sums = pair_of(sum[c]);
    device O* mine = my_out + part * DIMS + c * 8 + my_column;
    mine[0] = O(sums.x / divisor);
    mine[1] = O(sums.y / divisor);
  }
  if (IS_PARTIAL && part == 0) {
    const int i = my_column / 2;
    my_out[LATENT + i] = O(i == 0 ? softmax.highest : i == 1 ? total : 0.0f);
  }
}

if (thread_index < 8 && threadgroup_position_in_grid.z == 0) fence[thread_index] = 0;
