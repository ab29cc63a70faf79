// Causal attention of chunks over pages, by tiles of 8x8 matrices.
//
// queries      (T, H, D)                       of type T; each chunk's rows are consecutive
// k_pool, v_pool  (num_pages, K, page_size, D)    of type T; int8 and D + 4 where quantised
// page_tables  (S, max_pages) int32            entries past a sequence's last page may be anything
// tiles        (W, 8) int32                    sequence, first query row of the chunk, first line,
//                                              lines of the chunk, position of the chunk's first
//                                              row, first key, key after the last, window
// numbers      (8) float                       factor of the scores, softcap * log2(e) or 0,
//                                              1 where there are sinks
// sinks        (H)                             a logit per head, for the softmax's sum only
// after        (8) int32                       the last write's fence: bound, never read
// out          (T, H, D)                       of type T
// fence        (8) int32                       out: bound by the next kernel that writes the pools
//
// template: T, D, SIDE (lines and keys of a tile: 8, 16 or 32), IS_QUANTISED. Grid (4 * SIDE * SPLIT, K, W): one
// threadgroup per (kv head, tile), SPLIT simdgroups per 8 lines, each with its part of the dimensions
// in registers. A line is one head of one query row, so that all heads of a group share the keys and
// values they read:
//
//   line     0  1 .. G-1 | G .. 2G-1 | ...
//   row      0           | 1         |          G = H / K heads of the group

constexpr int SPLIT = D > 256 ? 2 : 1;
constexpr int DIMS = D / SPLIT;  // of a simdgroup
constexpr int BLOCKS = SIDE / 8;  // of 8 lines
constexpr int THREADS = SIDE * 4 * SPLIT;
constexpr int QUADS = D / 4;
constexpr int TILE_STRIDE = D + 16 / int(sizeof(T));  // in elements; 16 bytes more than a row
constexpr int SCORE_STRIDE = SIDE + 4;
constexpr int WEIGHT_STRIDE = SIDE + 8;
constexpr int COLUMNS = SIDE / 4;  // of a lane: four lanes share a line
constexpr float LOWEST = -1e30f;   // for minus infinity, which fast math may not support
constexpr float LOG2_E = 1.44269504088896340736f;
typedef vec<T, 4> Quad;
typedef simdgroup_matrix<T, 8, 8> Matrix;
typedef simdgroup_matrix<float, 8, 8> FloatMatrix;

threadgroup Quad tile_quads[SIDE * TILE_STRIDE / 4];  // queries, then keys and values in turn
threadgroup float scores[SPLIT * SIDE * SCORE_STRIDE];  // the sums of each part of the dimensions
threadgroup T weights[SIDE * WEIGHT_STRIDE];
threadgroup float diagonals[BLOCKS * 64];

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
threadgroup T* staged = (threadgroup T*)tile_quads;

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
threadgroup T* my_dims = staged + part * DIMS;
threadgroup float* my_sums = scores + (part * SIDE + simdgroup * 8) * SCORE_STRIDE;
#pragma clang loop unroll(full)
for (int c = 0; c < DIMS / 8; c++) {
  simdgroup_load(query[c], my_dims + simdgroup * 8 * TILE_STRIDE + c * 8, TILE_STRIDE);
  sum[c] = FloatMatrix(0.0f);
}
threadgroup_barrier(mem_flags::mem_threadgroup);  // keys replace the queries

// The softmax's state: four lanes hold a line's, and agree on it.
const int my_line = lane / 4;
const int my_column = lane % 4 * COLUMNS;
const int line = first_line + simdgroup * 8 + my_line;
const int my_position = position + line / group;
const int my_head = kv_head * group + line % group;
threadgroup float* my_scores = scores + (simdgroup * 8 + my_line) * SCORE_STRIDE + my_column;
threadgroup T* my_weights = weights + (simdgroup * 8 + my_line) * WEIGHT_STRIDE + my_column;
threadgroup float* diagonal = diagonals + simdgroup * 64;
// A sink is the first score of a line. Without sinks its placeholder weighs nothing as soon as a key
// is seen.
float highest = numbers[2] > 0.0f ? float(sinks[my_head]) * LOG2_E : LOWEST;
float total = 1.0f;

for (int first_key = tile[5]; first_key < end_key; first_key += SIDE) {
  // Rows past the end hold anything, NaN included, and 0 * NaN is NaN: zeros replace them.
  for (int i = thread_index; i < SIDE * QUADS; i += THREADS) {
    const int key = first_key + i / QUADS;
    Quad quad = Quad(T(0));
    if (key < end_key) {
      const long page = pages[key >> page_shift];
      const long slot = ((page * kv_heads + kv_head) << page_shift) + (key & page_mask);
      if (IS_QUANTISED) {
        const device char* row = (const device char*)k_pool + slot * (D + 4);
        const float4 x =
            float4(((const device char4*)row)[i % QUADS]) * *(const device float*)(row + D);
        quad = Quad(T(x.x), T(x.y), T(x.z), T(x.w));
      } else {
        quad = ((const device Quad*)(k_pool + slot * D))[i % QUADS];
      }
    }
    tile_quads[i / QUADS * (TILE_STRIDE / 4) + i % QUADS] = quad;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  #pragma clang loop unroll(full)
  for (int k = 0; k < SIDE; k += 8) {
    FloatMatrix product = FloatMatrix(0.0f);
    #pragma clang loop unroll(full)
    for (int c = 0; c < DIMS / 8; c++) {
      Matrix keys;
      simdgroup_load(keys, my_dims + k * TILE_STRIDE + c * 8, TILE_STRIDE, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(product, query[c], keys, product);
    }
    simdgroup_store(product, my_sums + k, SCORE_STRIDE);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // scores are complete; values replace the keys

  for (int i = thread_index; i < SIDE * QUADS; i += THREADS) {
    const int key = first_key + i / QUADS;
    Quad quad = Quad(T(0));
    if (key < end_key) {
      const long page = pages[key >> page_shift];
      const long slot = ((page * kv_heads + kv_head) << page_shift) + (key & page_mask);
      if (IS_QUANTISED) {
        const device char* row = (const device char*)v_pool + slot * (D + 4);
        const float4 x =
            float4(((const device char4*)row)[i % QUADS]) * *(const device float*)(row + D);
        quad = Quad(T(x.x), T(x.y), T(x.z), T(x.w));
      } else {
        quad = ((const device Quad*)(v_pool + slot * D))[i % QUADS];
      }
    }
    tile_quads[i / QUADS * (TILE_STRIDE / 4) + i % QUADS] = quad;
  }
  float score[COLUMNS];
  float next = highest;
  #pragma clang loop unroll(full)
  for (int c = 0; c < COLUMNS; c++) {
    const int distance = my_position - (first_key + my_column + c);
    float product = my_scores[c];
    if (SPLIT > 1) product += my_scores[SIDE * SCORE_STRIDE + c];
    score[c] = product * factor;
    if (cap > 0.0f) score[c] = cap * precise::tanh(score[c]);
    if (distance < 0 || distance >= window) score[c] = LOWEST;
    next = max(next, score[c]);
  }
  next = max(next, simd_shuffle_xor(next, ushort(1)));
  next = max(next, simd_shuffle_xor(next, ushort(2)));
  const float shrink = fast::exp2(highest - next);
  highest = next;
  float added = 0.0f;
  #pragma clang loop unroll(full)
  for (int c = 0; c < COLUMNS; c++) {
    // A line that has seen no key yet gives all weights 1; the first key's shrink clears them.
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
  threadgroup_barrier(mem_flags::mem_threadgroup);  // values, weights and diagonals are complete

  FloatMatrix shrinks;
  simdgroup_load(shrinks, diagonal, 8);
  #pragma clang loop unroll(full)
  for (int c = 0; c < DIMS / 8; c++) {
    FloatMatrix shrunk;
    simdgroup_multiply(shrunk, shrinks, sum[c]);
    #pragma clang loop unroll(full)
    for (int k = 0; k < SIDE; k += 8) {
      Matrix weight, values;
      simdgroup_load(weight, weights + simdgroup * 8 * WEIGHT_STRIDE + k, WEIGHT_STRIDE);
      simdgroup_load(values, my_dims + k * TILE_STRIDE + c * 8, TILE_STRIDE);
      simdgroup_multiply_accumulate(shrunk, weight, values, shrunk);
    }
    sum[c] = shrunk;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the next keys replace the values
}

// Each line divided by its total, eight dimensions at a time through the scores' memory.
#pragma clang loop unroll(full)
for (int c = 0; c < DIMS / 8; c++) {
  simdgroup_store(sum[c], my_sums, SCORE_STRIDE);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = lane % 4 * 2; i < lane % 4 * 2 + 2; i++) {
    const float value = my_sums[my_line * SCORE_STRIDE + i] / total;
    if (line < num_lines) {
      const long row = first_row + line / group;
      out[(row * heads + my_head) * D + part * DIMS + c * 8 + i] = T(value);
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

if (thread_index < 8 && kv_head == 0 && threadgroup_position_in_grid.z == 0) {
  fence[thread_index] = 0;
}
