// Walks products and keys of a layer as the producers and consumers of every CTA do, and prints "bad: …" unless each row of
// each weight is brought exactly once, each element of a result written exactly once, and each piece of keys taken once,
// with parts of shared units in places of their own. Arguments: hidden qkv q intermediate num_ctas, then lengths.

#include <cstdio>
#include <cstdlib>
#include <set>
#include <vector>

#define __device__
#define __forceinline__ inline
#include "decode_layers/layers_walk.cuh"

using namespace slipstream;

struct Rows {
  static constexpr bool kIsTiled = false;
};
struct Strips {
  static constexpr bool kIsTiled = true;
};

template <typename FORMAT>
void check_product(const char* name, int out_features, bool is_gated, int num_ctas) {
  const ProductWalk<FORMAT> walk(out_features, is_gated);
  std::vector<int> brought(out_features), written(is_gated ? out_features / 2 : out_features);
  for (int cta = 0; cta < num_ctas; ++cta) {
    const Range share = share_of_units(walk.num_units, cta, num_ctas);
    for (int begin = share.begin; begin < share.end; begin += walk.units_per_pass()) {
      const Range pass = walk.pass_at(begin, share);
      if (walk.num_tiles(pass) > ProductWalk<FORMAT>::kTiles) std::printf("bad: %s: a pass has too many tiles\n", name);
      for (int tile = 0; tile < walk.num_tiles(pass); ++tile) {
        for (int half = 0; half < 2; ++half) {
          for (int row = 0; row < 8; ++row) {
            const int unit = walk.unit_of(pass, tile, half, row);
            if (unit >= pass.end) continue;
            ++brought[walk.weight_row(unit, tile, half, row)];
            const bool is_up = is_gated && (FORMAT::kIsTiled ? tile % 2 : half) == 1;
            if (!is_up) ++written[walk.out_column(unit, half, row)];
          }
        }
      }
    }
  }
  for (int count : brought) if (count != 1) return (void)std::printf("bad: %s: a row brought %d times\n", name, count);
  for (int count : written) if (count != 1) return (void)std::printf("bad: %s: written %d times\n", name, count);
}

template <int TOKENS>
void check_keys(const LayersParams& p) {
  const int total = count_pieces<TOKENS>(p), share = pieces_of_share(p, total);
  std::vector<int> taken(total);
  std::set<int> slots;
  std::vector<std::vector<int>> arrived(p.num_tokens * p.num_kv_heads);
  std::vector<int> expected(arrived.size());
  for (int cta = 0; cta < p.num_ctas; ++cta) {
    const Range mine = share_of_pieces(share, total, cta);
    for (int piece = mine.begin; piece < mine.end;) {
      const KeyUnit unit = unit_of_piece<TOKENS>(p, piece);
      const UnitParts parts(unit, share);
      const int index = unit.index(p.num_kv_heads);
      if (parts.count > 1 && !slots.insert(parts.slot_of(cta)).second) std::printf("bad: two parts in one place\n");
      arrived[index].push_back(cta);
      expected[index] = parts.count;
      if (cta < parts.first_cta || cta >= parts.first_cta + parts.count) std::printf("bad: a CTA is no part\n");
      for (; piece < least(mine.end, unit.start + unit.num_pieces); ++piece) ++taken[piece];
    }
  }
  for (int count : taken) if (count != 1) return (void)std::printf("bad: keys taken %d times\n", count);
  for (size_t unit = 0; unit < arrived.size(); ++unit) {
    if (static_cast<int>(arrived[unit].size()) != expected[unit]) std::printf("bad: unit %zu awaits another number of parts\n", unit);
  }
}

template <typename FORMAT>
void check_layer(const LayersParams& p) {
  for (int product = 0; product < kNumProducts; ++product) {
    const char* names[] = {"qkv", "o", "gate_up", "down"};
    check_product<FORMAT>(names[product], out_features(p, product), product == kGateUp, p.num_ctas);
  }
}

int main(int count, char** arguments) {
  LayersParams p = {};
  p.hidden_size = std::atoi(arguments[1]), p.qkv_size = std::atoi(arguments[2]), p.q_size = std::atoi(arguments[3]);
  p.intermediate_size = std::atoi(arguments[4]), p.num_ctas = std::atoi(arguments[5]);
  p.num_kv_heads = (p.qkv_size - p.q_size) / 256;
  std::vector<int32_t> lengths;
  for (int i = 6; i < count; ++i) lengths.push_back(std::atoi(arguments[i]));
  p.seq_lens = lengths.data(), p.num_tokens = static_cast<int32_t>(lengths.size());
  check_layer<Rows>(p);
  check_layer<Strips>(p);
  for (p.min_share = 1; p.min_share <= 4; ++p.min_share) check_keys<64>(p), check_keys<32>(p);
  std::puts("walked");
}
