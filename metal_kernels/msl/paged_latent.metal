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
constexpr int WEIGHT_STRIDE = KEYS + 8;
constexpr int COLUMNS = KEYS / 4;  // of a lane: four lanes share a line
constexpr int OUT_STRIDE = IS_PARTIAL ? LATENT + 4 : LATENT;
constexpr float LOWEST = -1e30f;  // for minus infinity, which fast math may not support
constexpr float LOG2_E = 1.44269504088896340736f;
typedef vec<T, 4> Quad;
typedef simdgroup_matrix<T, 8, 8> Matrix;
typedef simdgroup_matrix<float, 8, 8> FloatMatrix;

threadgroup Quad tile_quads[KEYS * TILE_STRIDE / 4];  // queries, then keys: latents | rotated
threadgroup float scores[SPLIT * LINES * SCORE_STRIDE];  // the sums of each part of the dimensions
threadgroup T weights[LINES * WEIGHT_STRIDE];
threadgroup float diagonals[LINES / 8 * 64];

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

// The softmax's state: four lanes hold a line's, and agree on it.
const int my_line = lane / 4;
const int my_column = lane % 4 * COLUMNS;
const int line = first_line + simdgroup * 8 + my_line;
const int my_position = position + line / heads;
threadgroup float* my_sums = scores + (part * LINES + simdgroup * 8) * SCORE_STRIDE;
threadgroup float* my_scores = scores + (simdgroup * 8 + my_line) * SCORE_STRIDE + my_column;
threadgroup T* my_weights = weights + (simdgroup * 8 + my_line) * WEIGHT_STRIDE + my_column;
threadgroup float* diagonal = diagonals + simdgroup * 64;
const FloatMatrix scale = FloatMatrix(numbers[0]);  // on the diagonal
float highest = LOWEST;
float total = 0.0f;

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

  #pragma clang loop unroll(full)
  for (int k = 0; k < KEYS; k += 8) {
    FloatMatrix of_latents = FloatMatrix(0.0f);
    FloatMatrix product;
    Matrix keys;
    #pragma clang loop unroll(full)
    for (int c = 0; c < DIMS / 8; c++) {
      simdgroup_load(keys, my_dims + k * TILE_STRIDE + c * 8, TILE_STRIDE, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(of_latents, query[c], keys, of_latents);
    }
    // Scaled in float32. The rotated queries come scaled.
    simdgroup_multiply(product, scale, of_latents);
    #pragma clang loop unroll(full)
    for (int c = 0; c < ROPE_DIMS / 8; c++) {
      simdgroup_load(keys, my_rope_dims + k * TILE_STRIDE + c * 8, TILE_STRIDE, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(product, rope_query[c], keys, product);
    }
    simdgroup_store(product, my_sums + k, SCORE_STRIDE);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the scores of all parts are complete

  float score[COLUMNS];
  float next = highest;
  #pragma clang loop unroll(full)
  for (int c = 0; c < COLUMNS; c++) {
    float product = my_scores[c];
    if (SPLIT > 1) product += my_scores[LINES * SCORE_STRIDE + c];
    score[c] = product * LOG2_E;
    if (first_key + my_column + c > my_position) score[c] = LOWEST;
    next = max(next, score[c]);
  }
  next = max(next, simd_shuffle_xor(next, ushort(1)));
  next = max(next, simd_shuffle_xor(next, ushort(2)));
  const float shrink = fast::exp2(highest - next);
  highest = next;
  float added = 0.0f;
  #pragma clang loop unroll(full)
  for (int c = 0; c < COLUMNS; c++) {
    const float weight = fast::exp2(score[c] - next);
    if (part == 0) my_weights[c] = T(weight);
    added += weight;
  }
  added += simd_shuffle_xor(added, ushort(1));
  added += simd_shuffle_xor(added, ushort(2));
  total = total * shrink + added;
  for (int c = lane % 4 * 2; c < lane % 4 * 2 + 2 && part == 0; c++) {
    diagonal[my_line * 8 + c] = c == my_line ? shrink : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // weights and diagonals are complete

  FloatMatrix shrinks;
  simdgroup_load(shrinks, diagonal, 8);
  #pragma clang loop unroll(full)
  for (int c = 0; c < DIMS / 8; c++) {
    FloatMatrix shrunk;
    simdgroup_multiply(shrunk, shrinks, sum[c]);
    #pragma clang loop unroll(full)
    for (int k = 0; k < KEYS; k += 8) {
      Matrix weight, values;
      simdgroup_load(weight, weights + simdgroup * 8 * WEIGHT_STRIDE + k, WEIGHT_STRIDE);
      simdgroup_load(values, my_dims + k * TILE_STRIDE + c * 8, TILE_STRIDE);
      simdgroup_multiply_accumulate(shrunk, weight, values, shrunk);
    }
    sum[c] = shrunk;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the next keys replace these
}

// Each line, divided by its total or partial, eight dimensions at a time through the scores' memory.
const float divisor = IS_PARTIAL ? 1.0f : total;
device O* my_out = out + (first_out + line) * OUT_STRIDE;
#pragma clang loop unroll(full)
for (int c = 0; c < DIMS / 8; c++) {
  simdgroup_store(sum[c], my_sums, SCORE_STRIDE);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = lane % 4 * 2; i < lane % 4 * 2 + 2; i++) {
    const float value = my_sums[my_line * SCORE_STRIDE + i] / divisor;
    if (line < num_lines) my_out[part * DIMS + c * 8 + i] = O(value);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}
if (IS_PARTIAL && part == 0 && line < num_lines) {
  const int i = lane % 4;
  my_out[LATENT + i] = O(i == 0 ? highest : i == 1 ? total : 0.0f);
}

if (thread_index < 8 && threadgroup_position_in_grid.z == 0) fence[thread_index] = 0;
