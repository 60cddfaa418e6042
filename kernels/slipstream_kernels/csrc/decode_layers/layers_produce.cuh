// The producer warps: bring weights and keys of all phases of all layers through the ring, in the order of their use. They
// await nothing but free slots, for nobody writes weights, nor keys of former steps: while consumers wait for other CTAs,
// the next phase's bytes arrive.
#pragma once

#include "decode_layers/layers_formats.cuh"

namespace slipstream {

template <typename FORMAT, int KV_BYTES>
struct Producer {
  using Shape = LayersShape<FORMAT>;
  static constexpr int kCopyTokens = Shape::kCopyBytes / (kHeadDim * KV_BYTES), kPieceTokens = 4 * kCopyTokens;

  const LayersParams& p;
  const LayersMemory<FORMAT>& memory;
  uint64_t policy = evict_first_policy();
  PipelineState<Shape::kSlots> pipe, behind;   // behind: of the slot that must have arrived before the next is asked for
  int under_way = 0;
  int lane = threadIdx.x % 32, turn = threadIdx.x / 32 - Shape::kWarps;   // turn 0: this warp's slot

  __device__ __forceinline__ void produce_all() {
#pragma unroll 1
    for (int phase = 0; phase < p.num_layers * kNumProducts; ++phase) {
      const LayerTensors& tensors = memory.table()[phase / kNumProducts];
      const int product = phase % kNumProducts;
      if (product == kOut) produce_keys(tensors);
      produce(tensors.weight[product], tensors.words[product], product);
    }
  }

 private:
  // Whether the next slot of the ring is this warp's; the producers take turns.
  __device__ __forceinline__ bool takes_slot() {
    const bool is_mine = turn == 0;
    turn = is_mine ? Shape::kProducers - 1 : turn - 1;
    return is_mine;
  }

  __device__ __forceinline__ void produce(const void* weight, const void* words, int product) {
    const ProductWalk<FORMAT> walk(out_features(p, product), product == kGateUp);
    const int features = in_features(p, product), chunks = num_chunks<FORMAT>(features);
    const Range share = share_of_units(walk.num_units, blockIdx.x, p.num_ctas);
#pragma unroll 1
    for (int begin = share.begin; begin < share.end; begin += walk.units_per_pass()) {
      const Range pass = walk.pass_at(begin, share);
      const int parts = (FORMAT::kIsTiled ? 1 : 2) * walk.num_tiles(pass);
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll 1
        for (int part = 0; part < parts; ++part, advance()) {
          if (!takes_slot()) continue;
          if constexpr (FORMAT::kIsTiled) fill_tile(walk, weight, words, pass, part, chunk, features);
          else fill_rows(walk, weight, pass, part, chunk, features);
        }
      }
    }
  }

  __device__ __forceinline__ void advance() {
    pipe.advance();
    if (under_way < p.slots_under_way) ++under_way;
    else behind.advance();
  }

  // Requests that queue make every other request wait, too: no more of them at once than keep memory busy.
  __device__ __forceinline__ void await_slot() const {
    wait_barrier(memory.empty(pipe.stage), pipe.parity ^ 1);
    if (under_way == p.slots_under_way) {
      wait_barrier(memory.full(behind.stage), behind.parity);
    }
  }

  // 8 rows, one by each of 8 lanes.
  __device__ __forceinline__ void fill_rows(const ProductWalk<FORMAT>& walk, const void* weight, const Range& pass, int half,
                                            int chunk, int features) {
    const int64_t row_bytes = int64_t{features} * FORMAT::kFeatureBits / 8, first = int64_t{chunk} * 2048;
    const uint32_t bytes = static_cast<uint32_t>(least(row_bytes - first, int64_t{2048}));
    const int num_rows = most(0, least(pass.end - walk.unit_of(pass, half / 2, half % 2, 0), 8));
    await_slot();
    if (lane == 0) arrive_expecting(memory.full(pipe.stage), bytes * num_rows);
    __syncwarp();
    if (lane >= num_rows) return;
    const int64_t row = walk.weight_row(walk.unit_of(pass, half / 2, half % 2, lane), half / 2, half % 2, lane);
    copy_bulk(memory.slot(pipe.stage) + lane * FORMAT::kRowPitch, static_cast<const char*>(weight) + row * row_bytes + first,
              bytes, memory.full(pipe.stage), policy);
  }

  // Codes by one lane, scales and zero points by another.
  __device__ __forceinline__ void fill_tile(const ProductWalk<FORMAT>& walk, const void* codes, const void* words,
                                             const Range& pass, int tile, int chunk, int features) {
    const int of_tile = features / 128, first = chunk * FORMAT::kBlocks, blocks = least(of_tile - first, FORMAT::kBlocks);
    const int row = walk.weight_row(walk.unit_of(pass, tile, 0, 0), tile, 0, 0);
    const int64_t block = int64_t{row / 16} * of_tile + first;
    await_slot();
    if (lane == 0) arrive_expecting(memory.full(pipe.stage), blocks * (FORMAT::kBlockBytes + FORMAT::kWordBytes));
    __syncwarp();
    if (lane >= 2) return;
    const int each = lane == 0 ? FORMAT::kBlockBytes : FORMAT::kWordBytes;
    copy_bulk(memory.slot(pipe.stage) + (lane == 0 ? 0 : FORMAT::kWordOffset),
              static_cast<const char*>(lane == 0 ? codes : words) + block * each, blocks * each, memory.full(pipe.stage),
              policy);
  }

  __device__ __forceinline__ void produce_keys(const LayerTensors& tensors) {
    const int total = count_pieces<kPieceTokens>(p);
    const Range share = share_of_pieces(pieces_of_share(p, total), total, blockIdx.x);
#pragma unroll 1
    for (int piece = share.begin; piece < share.end; ++piece, advance()) {
      if (takes_slot()) fill_keys(tensors, piece);
    }
  }

  // 4 runs of keys by lanes 0..3, of values by lanes 4..7. Runs past the sequence are not copied; consumers pass them over.
  __device__ __forceinline__ void fill_keys(const LayerTensors& tensors, int piece) {
    const KeyUnit unit = unit_of_piece<kPieceTokens>(p, piece);
    const int first = (piece - unit.start) * kPieceTokens, token = first + lane % 4 * kCopyTokens;
    const int runs = most(0, least(4, (unit.seq_len - first + kCopyTokens - 1) / kCopyTokens));
    const char* from = nullptr;
    if (lane < 8 && lane % 4 < runs) {
      const int block = p.block_tables[unit.request * p.table_stride + (token >> p.block_size_log2)];
      const int64_t head_block = int64_t{most(block, 0)} * p.num_kv_heads + unit.head;
      const int64_t row = (head_block << p.block_size_log2) + (token & ((1 << p.block_size_log2) - 1));
      from = static_cast<const char*>(lane < 4 ? tensors.key_cache : tensors.value_cache) + row * kHeadDim * KV_BYTES;
    }
    await_slot();
    if (lane == 0) arrive_expecting(memory.full(pipe.stage), 2 * runs * Shape::kCopyBytes);
    __syncwarp();
    if (from == nullptr) return;
    const uint32_t to = memory.slot(pipe.stage) + lane / 4 * Shape::kValueOffset + lane % 4 * Shape::kCopyPitch;
    copy_bytes(to, from, memory.full(pipe.stage), Shape::kCopyBytes);
  }
};

}  // namespace slipstream
