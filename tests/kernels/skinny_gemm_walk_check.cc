// Walks the weights of one product as every CTA's producers do, by shares and by the queue, and prints "bad: …" unless
// each byte of each row is brought exactly once. Arguments: out_features in_features num_ctas; one line per variant.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "schedule/skinny_gemm_walk.cuh"

struct Bits16 {
  using Operand = short;
  static constexpr int kElements = 8, kSteps = 2, kGroupSpans = 2;
  static constexpr bool kIsScaledInside = false;
};
struct Bits8 {
  using Operand = short;
  static constexpr int kElements = 16, kSteps = 4, kGroupSpans = 2;
  static constexpr bool kIsScaledInside = false;
};

template <typename SHAPE>
bool covers(const SkinnyGemmParams& p, int out_features, const std::vector<slipstream::WorkRange>& passes) {
  const long row_bytes = p.in_features * 16L / SHAPE::Format::kElements;
  std::vector<int> brought(out_features * (row_bytes / 16));
  for (const auto& pass : passes) {
    for (slipstream::StageWalk<SHAPE> walk(p, pass); !walk.is_done(); walk.advance()) {
      for (int row = 0; row < walk.num_rows(); ++row) {
        const long first = walk.offset(row) / 16;
        for (unsigned i = 0; i < walk.chunk_bytes() / 16; ++i) ++brought[first + i];
      }
    }
  }
  for (size_t i = 0; i < brought.size(); ++i) {
    if (brought[i] == 1) continue;
    std::printf("bad: bytes %zu of row %zu brought %d times\n", i * 16 % row_bytes, i * 16 / row_bytes, brought[i]);
    return false;
  }
  return true;
}

template <typename FORMAT, int TILES, int COLUMNS, bool IS_GATED, bool IS_RESIDENT>
void check(int out_features, int in_features, int num_ctas) {
  using Shape = slipstream::SkinnyGemmShape<FORMAT, TILES, COLUMNS, IS_GATED, IS_RESIDENT>;
  SkinnyGemmParams p{};
  p.num_outputs = IS_GATED ? out_features / 2 : out_features;
  p.in_features = in_features;
  p.num_ctas = num_ctas;
  std::vector<slipstream::WorkRange> shares, queued;
  for (int cta = 0; cta < num_ctas; ++cta) {
    const slipstream::WorkRange outputs = slipstream::outputs_of_cta(p, cta);
    for (int begin = outputs.begin; begin < outputs.end; begin += Shape::kOutputsPerPass) {
      shares.push_back(slipstream::pass_at<Shape>(begin, outputs));
    }
  }
  for (int index = 0; index < slipstream::num_passes<Shape>(p); ++index) {
    queued.push_back(slipstream::pass_of_index<Shape>(p, index));
  }
  for (const auto& passes : {shares, queued}) {
    if (!covers<Shape>(p, out_features, passes)) return;
  }
  std::printf("tiles %d columns %d gated %d resident %d\n", TILES, COLUMNS, IS_GATED, IS_RESIDENT);
}

template <typename FORMAT>
void check_all(int out_features, int in_features, int num_ctas) {
  check<FORMAT, 2, 1, false, false>(out_features, in_features, num_ctas);
  check<FORMAT, 3, 2, false, false>(out_features, in_features, num_ctas);
  check<FORMAT, 2, 1, false, true>(out_features, in_features, num_ctas);
  check<FORMAT, 3, 1, true, true>(out_features, in_features, num_ctas);
  check<FORMAT, 4, 2, true, false>(out_features, in_features, num_ctas);
}

int main(int, char** arguments) {
  const int out_features = std::atoi(arguments[1]), in_features = std::atoi(arguments[2]);
  check_all<Bits16>(out_features, in_features, std::atoi(arguments[3]));
  check_all<Bits8>(out_features, in_features, std::atoi(arguments[3]));
}
