// Attention of chunks over pages, as paged_prefill.metal, with the same arguments, by cooperative tensors.
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
// template: T (half or bfloat), D (a multiple of 32), IS_QUANTISED, HAS_ENDS. Grid (128, K, W): one threadgroup per
// (kv head, tile). Each of its four simdgroups has 16 lines; above 128 dimensions two of them have the same 16, each
// with all scores and its half of the outputs:
//
//   line     0  1 .. G-1 | G .. 2G-1 | ...
//   row      0           | 1         |          G = H / K heads of the group
//
// A simdgroup waits for no other one: keys, values and queries are read from the device's memory, 32 keys at a
// time, where the four find the same rows in the cache.

constexpr int SPLIT = D > 128 ? 2 : 1;
constexpr int DIMS = D / SPLIT;  // of the outputs of a simdgroup
constexpr int KEYS = 32;
typedef vec<T, 4> Quad;

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
const int num_lines = tile[3];
const int end_key = tile[6];
const int window = tile[7];
const float factor = numbers[0];
const float cap = numbers[1];
const device int* pages = page_tables + long(tile[0]) * page_tables_shape[1];
const int my_column = fragment_column(lane);

// A lane has two lines, with the state of their softmax, on which the four lanes of a line agree.
long my_rows[2];  // of queries and outputs: (row, head); -1 past the last line
int my_positions[2];
int aheads[2];  // positions after its own that a line sees
Softmax<float> softmax[2];
#pragma clang loop unroll(full)
for (int r = 0; r < 2; r++) {
  const int line = tile[2] + simdgroup * 16 + fragment_line(lane) + 8 * r;
  const int head = kv_head * group + line % group;
  const long row = first_row + line / group;
  my_rows[r] = line < num_lines ? row * heads + head : -1;
  my_positions[r] = tile[4] + line / group;
  aheads[r] = HAS_ENDS && line < num_lines ? ends[row] - 1 - my_positions[r] : 0;
  softmax[r].highest = numbers[2] > 0.0f ? float(sinks[head]) * LOG2_E : LOWEST;
  softmax[r].total = my_column == 0 ? 1.0f : 0.0f;
}
float sums[DIMS / 32][16];
#pragma clang loop unroll(full)
for (int c = 0; c < DIMS / 32; c++) {
  #pragma clang loop unroll(full)
  for (int i = 0; i < 16; i++) sums[c][i] = 0.0f;
}

for (int first_key = tile[5]; first_key < end_key; first_key += KEYS) {
  // Rows past the end hold anything, NaN included, and 0 * NaN is NaN: zeros replace them.
  long slots[4];  // of the lane's two keys of each fragment; -1 past the end
  #pragma clang loop unroll(full)
  for (int i = 0; i < 4; i++) {
    const int key = first_key + i * 8 + fragment_line(lane);
    slots[i] = -1;
    if (key < end_key) {
      const long page = pages[key >> page_shift];
      slots[i] = ((page * kv_heads + kv_head) << page_shift) + (key & page_mask);
    }
  }
  float scores[16];
  #pragma clang loop unroll(full)
  for (int i = 0; i < 16; i++) scores[i] = 0.0f;
  #pragma clang loop unroll_count(4)
  for (int d = 0; d < D / 16; d++) {
    const int quad = (d * 16 + my_column) / 4;
    T query[8];
    T keys[16];
    #pragma clang loop unroll(full)
    for (int r = 0; r < 2; r++) {
      Quad numbers_of_query = Quad(T(0));
      if (my_rows[r] >= 0) numbers_of_query = ((const device Quad*)(queries + my_rows[r] * D))[quad];
      put_quad(query, r, numbers_of_query);
    }
    #pragma clang loop unroll(full)
    for (int i = 0; i < 4; i++) {
      Quad key = Quad(T(0));
      if (slots[i] >= 0) key = row_quad<T, D, IS_QUANTISED>(k_pool, slots[i], quad);
      put_quad(keys, i, key);
    }
    add_product<true, T>(query, keys, scores);
  }

  T weights[2][8];  // of both fragments of keys
  #pragma clang loop unroll(full)
  for (int r = 0; r < 2; r++) {
    float next = softmax[r].highest;
    #pragma clang loop unroll(full)
    for (int i = 0; i < 8; i++) {
      const int distance = my_positions[r] - (first_key + i / 4 * 16 + my_column + i % 4);
      const int at = i / 4 * 8 + r * 4 + i % 4;
      float score = capped(scores[at] * factor, cap);
      if (distance < -aheads[r] || distance >= window) score = LOWEST;
      scores[at] = score;
      next = max(next, score);
    }
    next = line_max(next);
    // The sums shrink only where a line's maximum grew.
    if (simd_any(next > softmax[r].highest)) {
      const float shrink = softmax[r].raise(next);
      #pragma clang loop unroll(full)
      for (int c = 0; c < DIMS / 32; c++) {
        #pragma clang loop unroll(full)
        for (int i = 0; i < 8; i++) sums[c][i / 4 * 8 + r * 4 + i % 4] *= shrink;
      }
    }
    #pragma clang loop unroll(full)
    for (int i = 0; i < 8; i++) {
      // A line that has seen no key yet gives all weights 1; the first key's shrink clears them.
      weights[i / 4][r * 4 + i % 4] = T(softmax[r].weigh(scores[i / 4 * 8 + r * 4 + i % 4]));
    }
  }

  #pragma clang loop unroll(full)
  for (int c = 0; c < DIMS / 32; c++) {
    #pragma clang loop unroll(full)
    for (int k = 0; k < 2; k++) {
      T values[16];
      #pragma clang loop unroll(full)
      for (int i = 0; i < 4; i++) {
        const int which = k * 2 + i % 2;
        const int quad = (part * DIMS + c * 32 + i / 2 * 16 + my_column) / 4;
        Quad value = Quad(T(0));
        if (slots[which] >= 0) value = row_quad<T, D, IS_QUANTISED>(v_pool, slots[which], quad);
        put_quad(values, i, value);
      }
      add_product<false, T>(weights[k], values, sums[c]);
    }
  }
}

// Each line divided by its total.
#pragma clang loop unroll(full)
for (int r = 0; r < 2; r++) {
  const float total = line_sum(softmax[r].total);
  if (my_rows[r] >= 0) {
    device Quad* my_out = (device Quad*)(out + my_rows[r] * D + part * DIMS + my_column);
    #pragma clang loop unroll(full)
    for (int i = 0; i < DIMS / 16; i++) {
      const int at = i % 2 * 8 + r * 4;
      my_out[i * 4] = Quad(
          T(sums[i / 2][at] / total), T(sums[i / 2][at + 1] / total),
          T(sums[i / 2][at + 2] / total), T(sums[i / 2][at + 3] / total));
    }
  }
}

if (thread_index_in_threadgroup < 8 && kv_head == 0 && threadgroup_position_in_grid.z == 0) {
  fence[thread_index_in_threadgroup] = 0;
}
