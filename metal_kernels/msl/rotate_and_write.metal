// Normalises and rotates the queries and keys of rows, and writes keys and values into their slots: all that
// lies between a layer's projections and its attention.
//
// queries         (T, HEADS, STEP)                 of type T: a head's first D elements are its query; where
//                                                  JOINED is 1: (T, HEADS * STEP + 2 K D), one projection
// keys, values    (T, K, D)                        of type T; not read where JOINED is 1
// turns           (T, R) float                     of each pair of dimensions its cosine and its sine, where
//                                                  the pair's two elements are
// q_weight        (D)                              of type T, of the norm; not read where NORMS is 0
// k_weight        (D)                              likewise
// numbers         (8) float                        epsilon of queries' norm, of keys', of values'
// moves           (T, 2) int32                     row, slot: of every row; slots all different
// k_pool, v_pool  (num_pages, K, page_size, D)     of type T; int8 and D + 4 where quantised; written in place
// after_a/b       (8) int32                        bound for their order, never read
// rotated         (T, HEADS, D)                    out, of type T: the queries
// fence           (8) int32                        out: bound by the next kernel that reads the pools
//
// template: T, D, R <= D, HEADS, STEP, JOINED, NORMS (1: of queries and keys, 2: of values as well, without a
// weight), IS_TRADITIONAL (pairs are neighbours, and not of the halves of the first R dimensions), IS_QUANTISED.
// One simdgroup per head of a row, queries, keys, values: grid (32, HEADS + 2 K, T).

constexpr int HALF = R / 2;
constexpr int PAIRS = (HALF + 31) / 32;
constexpr int COUNT = 2 * PAIRS + (D - R + 31) / 32;  // elements of a lane: pairs, then what is not rotated
constexpr int ROW = D + 4;  // bytes of a quantised row
const int lane = int(thread_index_in_simdgroup);
const int head = int(thread_position_in_grid.y);
const int move = int(thread_position_in_grid.z);
const int kv_heads = k_pool_shape[1];
const int page_shift = ctz(k_pool_shape[2]);
const bool is_query = head < HEADS;
const bool is_value = head >= HEADS + kv_heads;
const int kv_head = is_value ? head - HEADS - kv_heads : head - HEADS;

const int row = moves[2 * move];
const int slot = moves[2 * move + 1];
const int page = slot >> page_shift;
const int offset = slot & ((1 << page_shift) - 1);
const ulong target = ((ulong(page) * kv_heads + kv_head) << page_shift) + offset;
const device float* turn = turns + ulong(row) * R;

const device T* source = queries + (ulong(row) * HEADS + head) * STEP;
if (JOINED) {
  source = queries + ulong(row) * (HEADS * STEP + 2 * kv_heads * D) + head * STEP;
  if (!is_query) source -= (head - HEADS) * (STEP - D);
} else if (!is_query) {
  source = (is_value ? values : keys) + (ulong(row) * kv_heads + kv_head) * D;
}

// Where the lane's elements are in a head; D or more for none.
int at[COUNT];
T element[COUNT];
#pragma clang loop unroll(full)
for (int c = 0; c < PAIRS; c++) {
  const int pair = c * 32 + lane;
  at[2 * c] = pair >= HALF ? D : IS_TRADITIONAL ? 2 * pair : pair;
  at[2 * c + 1] = pair >= HALF ? D : IS_TRADITIONAL ? 2 * pair + 1 : pair + HALF;
}
#pragma clang loop unroll(full)
for (int c = 2 * PAIRS; c < COUNT; c++) at[c] = R + (c - 2 * PAIRS) * 32 + lane;
#pragma clang loop unroll(full)
for (int c = 0; c < COUNT; c++) element[c] = at[c] < D ? source[at[c]] : T(0.0f);

if (NORMS > int(is_value)) {
  float squares = 0.0f;
  #pragma clang loop unroll(full)
  for (int c = 0; c < COUNT; c++) squares += float(element[c]) * float(element[c]);
  const float mean = simd_sum(squares) / float(D);
  const float factor = precise::rsqrt(mean + numbers[is_query ? 0 : is_value ? 2 : 1]);
  const device T* weight = is_query ? q_weight : k_weight;
  #pragma clang loop unroll(full)
  for (int c = 0; c < COUNT; c++) {
    const float gain = is_value || at[c] >= D ? 1.0f : float(weight[at[c]]);
    element[c] = T(gain * float(T(float(element[c]) * factor)));
  }
}

if (!is_value) {
  #pragma clang loop unroll(full)
  for (int c = 0; c < PAIRS; c++) {
    if (at[2 * c] < D) {
      const float cosine = turn[at[2 * c]];
      const float sine = turn[at[2 * c + 1]];
      const float first = float(element[2 * c]);
      const float second = float(element[2 * c + 1]);
      element[2 * c] = T(first * cosine - second * sine);
      element[2 * c + 1] = T(first * sine + second * cosine);
    }
  }
}

if (is_query || !IS_QUANTISED) {
  device T* out = rotated + (ulong(row) * HEADS + head) * D;
  if (!is_query) out = (device T*)(is_value ? v_pool : k_pool) + target * D;
  #pragma clang loop unroll(full)
  for (int c = 0; c < COUNT; c++) {
    if (at[c] < D) out[at[c]] = element[c];
  }
} else {
  device char* stored = (device char*)(is_value ? v_pool : k_pool) + target * ROW;
  uint highest = 0;
  #pragma clang loop unroll(full)
  for (int c = 0; c < COUNT; c++) {
    highest = max(highest, magnitude(float(element[c])));
  }
  highest = simd_max(highest);
  const bool is_kept = has_values(highest);
  const float scale = scale_of(highest);
  #pragma clang loop unroll(full)
  for (int c = 0; c < COUNT; c++) {
    const char value = is_kept ? char(rint(float(element[c]) / scale)) : char(0);
    if (at[c] < D) stored[at[c]] = value;
  }
  if (lane == 0) *(device uint*)(stored + D) = scale_bits(highest);
}

if (lane < 8 && head == 0 && move == 0) fence[lane] = 0;
