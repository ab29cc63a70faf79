// Products of a few rows with quantised weights, by one pass of the weights. A row's results equal bit by bit those
// of MLX's product of that row alone: the same lanes take the same numbers, and add them in the same order.
//
// rows            (ROWS, K)                  of type T
// weights         (N, K * BITS / 32) uint32  N a multiple of 8, K of GROUP
// scales, biases  (N, K / GROUP)             of type T
// out             (ROWS, N)                  of type T
//
// template: T, BITS (4 or 8), GROUP (weights of a scale), ROWS, PACKS (words of a lane in a block: 2 in MLX's
// qmv_fast, 1 in its qmv). A simdgroup has four results of each row: grid (32, N / 4), two simdgroups a threadgroup.
// A lane keeps its words of four results in registers, while it loads one row after the other:
//
//   lane      0      1    ...    31     0      1    ...
//   words    0, 1   2, 3        62, 63  64, 65       ...     of a result, with PACKS = 2

constexpr int RESULTS = 4;
constexpr int IN_WORD = 32 / BITS;  // numbers of a word
constexpr int NUMBERS = IN_WORD * PACKS;  // of a lane in a block
constexpr int WIDTH = 4;  // of one load
typedef vec<T, WIDTH> Loaded;

const int lane = int(thread_index_in_simdgroup);
const int first = int(thread_position_in_grid.y) * RESULTS;
const int columns = weights_shape[0];
const int words = weights_shape[1];
const int depth = words * IN_WORD;
const int groups = depth / GROUP;

float result[ROWS][RESULTS];
#pragma clang loop unroll(full)
for (int r = 0; r < ROWS; r++) {
  #pragma clang loop unroll(full)
  for (int c = 0; c < RESULTS; c++) result[r][c] = 0.0f;
}

for (int k = lane * NUMBERS; k < depth; k += 32 * NUMBERS) {
  uint word[RESULTS][PACKS];
  float scale[RESULTS], bias[RESULTS];
  #pragma clang loop unroll(full)
  for (int c = 0; c < RESULTS; c++) {
    const long row = first + c;
    const device uint* packed = weights + row * words + k / IN_WORD;
    #pragma clang loop unroll(full)
    for (int p = 0; p < PACKS; p++) word[c][p] = packed[p];
    scale[c] = float((scales + row * groups)[k / GROUP]);
    bias[c] = float((biases + row * groups)[k / GROUP]);
  }
  #pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; r++) {
    float number[NUMBERS];
    float sum = 0.0f;
    #pragma clang loop unroll(full)
    for (int i = 0; i < NUMBERS; i += WIDTH) {
      const Loaded loaded = *(const device Loaded*)(rows + r * depth + k + i);
      const float a = float(loaded[0]), b = float(loaded[1]), c = float(loaded[2]), d = float(loaded[3]);
      if (BITS == 4) {
        // The numbers are divided, so that bits of the weights need not be shifted.
        sum += a + b + c + d;
        number[i] = a;
        number[i + 1] = b / 16.0f;
        number[i + 2] = c / 256.0f;
        number[i + 3] = d / 4096.0f;
      } else {
        sum += a;
        sum += b;
        sum += c;
        sum += d;
        number[i] = a;
        number[i + 1] = b;
        number[i + 2] = c;
        number[i + 3] = d;
      }
    }
    #pragma clang loop unroll(full)
    for (int c = 0; c < RESULTS; c++) {
      float product = 0.0f;
      #pragma clang loop unroll(full)
      for (int i = 0; i < NUMBERS; i += WIDTH) {
        const uint bits = word[c][i / IN_WORD] >> (i % IN_WORD * BITS);
        if (BITS == 4) {
          product +=
              (number[i] * float(bits & 0x000f) + number[i + 1] * float(bits & 0x00f0) +
               number[i + 2] * float(bits & 0x0f00) + number[i + 3] * float(bits & 0xf000));
        } else {
          product += number[i] * float(bits & 0xff);
          product += number[i + 1] * float(bits >> 8 & 0xff);
          product += number[i + 2] * float(bits >> 16 & 0xff);
          product += number[i + 3] * float(bits >> 24);
        }
      }
      result[r][c] += scale[c] * product + sum * bias[c];
    }
  }
}

#pragma clang loop unroll(full)
for (int r = 0; r < ROWS; r++) {
  #pragma clang loop unroll(full)
  for (int c = 0; c < RESULTS; c++) {
    const float whole = simd_sum(result[r][c]);
    if (lane == 0) out[r * columns + first + c] = T(whole);
  }
}
