// Writes rows in 8 bits: of every head its values and their scale, as ops.py states the format.
//
// keys, values    (T, K, D)                        of type T
// moves           (M, 2) int32                     row, slot; slots all different
// k_pool, v_pool  (num_pages, K, page_size, D + 4)  int8, written in place
// after_a/b       (8) int32                        bound for their order, never read
// fence           (8) int32                        out: bound by the next kernel that reads the pools
//
// template: T, D. One simdgroup per (row, head), which a lane loads a few dimensions of: grid (32, K, M).

constexpr int WIDTH = D % 128 == 0 ? 4 : D % 64 == 0 ? 2 : 4;  // dimensions of one load
constexpr int LOADS = (D + 32 * WIDTH - 1) / (32 * WIDTH);
constexpr int ROW = D + 4;  // bytes of a row in the pools
typedef vec<T, WIDTH> Loaded;
typedef vec<float, WIDTH> Floats;
typedef vec<char, WIDTH> Chars;

const int lane = int(thread_index_in_simdgroup);
const int head = int(thread_position_in_grid.y);
const int move = int(thread_position_in_grid.z);
const int kv_heads = k_pool_shape[1];
const int page_shift = ctz(k_pool_shape[2]);

const int row = moves[2 * move];
const int slot = moves[2 * move + 1];
const int page = slot >> page_shift;
const int offset = slot & ((1 << page_shift) - 1);
const ulong source = ulong(row) * kv_heads + head;
const ulong target = ((ulong(page) * kv_heads + head) << page_shift) + offset;

#pragma clang loop unroll(full)
for (int side = 0; side < 2; side++) {
  const device T* numbers = (side == 0 ? keys : values) + source * D;
  device char* stored = (device char*)(side == 0 ? k_pool : v_pool) + target * ROW;
  Floats number[LOADS];
  uint highest = 0;
  #pragma clang loop unroll(full)
  for (int c = 0; c < LOADS; c++) {
    const int at = (c * 32 + lane) * WIDTH;
    number[c] = Floats(0.0f);
    if (at < D) number[c] = Floats(*(const device Loaded*)(numbers + at));
    #pragma clang loop unroll(full)
    for (int i = 0; i < WIDTH; i++) {
      highest = max(highest, magnitude(number[c][i]));
    }
  }
  highest = simd_max(highest);
  const bool is_kept = has_values(highest);
  const float scale = scale_of(highest);
  #pragma clang loop unroll(full)
  for (int c = 0; c < LOADS; c++) {
    const int at = (c * 32 + lane) * WIDTH;
    Chars value = Chars(char(0));
    #pragma clang loop unroll(full)
    for (int i = 0; i < WIDTH; i++) {
      if (is_kept) value[i] = char(rint(number[c][i] / scale));
    }
    if (at < D) *(device Chars*)(stored + at) = value;
  }
  if (lane == 0) *(device uint*)(stored + D) = scale_bits(highest);
}

if (lane < 8 && head == 0 && move == 0) fence[lane] = 0;
