// Products of at most 16 tokens with 4-bit weights, for Hopper (sm_90a). Contract: gemm/int4_mm.py.
//
// The bytes of the weights are the bound. One or two persistent CTAs per SM stream equal shares of strips of output
// features (int4_rows_shape.cuh) through a ring in shared memory, filled by bulk copies that one warp issues; 8 warps
// multiply 16 output features by 8 tokens at a time (int4_rows_multiply.cuh) and add their sums at the end. The kernel
// starts while the one before it still runs, and fills its ring before it waits for that one's results. Built once per
// SLIPSTREAM_INPUT: __nv_bfloat16 or __half.

#include "ptx/bulk_copy.cuh"
#include "ptx/dependent_launch.cuh"
#include "mma/int4_rows_multiply.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"

namespace slipstream {

// One copy of codes and one of words: the copy engine takes some 85 clocks for each, however small.
template <typename SHAPE>
__device__ __forceinline__ void fill_slot(const Int4RowsParams& p, uint32_t slot, uint32_t filled, int strip, int chunk,
                                          uint64_t policy) {
  const int first = chunk * SHAPE::kWarps, blocks = min(SHAPE::kWarps, num_blocks(p) - first);
  const int word_bytes = (p.is_channelwise != 0 ? 1 : blocks) * SHAPE::kWordBytes;
  arrive_expecting(filled, blocks * SHAPE::kBlockBytes + word_bytes);
  const int64_t block = int64_t{strip} * num_blocks(p) + first;
  copy_bulk(slot, reinterpret_cast<const char*>(p.codes) + block * SHAPE::kBlockBytes, blocks * SHAPE::kBlockBytes, filled,
            policy);
  const char* words = reinterpret_cast<const char*>(p.strip_words);
  const int64_t group = p.is_channelwise != 0 ? strip : block;
  copy_bulk(slot + SHAPE::kWordOffset, words + group * SHAPE::kWordBytes, word_bytes, filled, policy);
}

template <typename SHAPE>
__device__ __forceinline__ void fill_ring(const Int4RowsParams& p, uint32_t ring, uint32_t barriers) {
  if (threadIdx.x % 32 != 0) return;
  const UnitRange cta = strips_of_cta<SHAPE>(p);
  const int chunks = num_chunks<SHAPE>(p);
  const uint64_t policy = evict_first_policy();
  RingPlace<SHAPE::kSlots> place;
  for (int begin = cta.begin; begin < cta.end; begin += SHAPE::kTiles) {
    const int end = min(begin + SHAPE::kTiles, cta.end);
    for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll 1
      for (int strip = begin; strip < end; ++strip, place.advance()) {
        const uint32_t filled = barriers + 16 * place.stage;
        wait_barrier(filled + 8, place.parity ^ 1);
        fill_slot<SHAPE>(p, ring + place.stage * SHAPE::kSlotBytes, filled, strip_of_turn<SHAPE>(p, strip), chunk, policy);
      }
    }
  }
}

// Adds the warps' sums through shared memory, scales, biases and writes them.
template <typename SHAPE>
struct RowsEpilogue {
  using Out = typename SHAPE::Operand;
  const Int4RowsParams& p;
  float4* exchange;   // shared: [warp][fragment of the round][lane]
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ __forceinline__ void write(const UnitRange& pass, const RowSums<SHAPE>& sums) const {
#pragma unroll
    for (int first = 0; first < SHAPE::kFragments; first += SHAPE::kRound) {
      sync_threads(1, 32 * SHAPE::kWarps);   // what the round before left is read
#pragma unroll
      for (int i = 0; i < SHAPE::kRound; ++i) {
        if (first + i >= SHAPE::kFragments) continue;
        const float(&v)[4] = sums.of[(first + i) / SHAPE::kColumns][(first + i) % SHAPE::kColumns];
        exchange[(warp * SHAPE::kRound + i) * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
      }
      sync_threads(1, 32 * SHAPE::kWarps);
      finish_round(pass, first);
    }
  }

 private:
  // A warp finishes a fragment; gated, a fragment of a gate's strip and that of the up strip, which is the next.
  __device__ __forceinline__ void finish_round(const UnitRange& pass, int first) const {
    constexpr int kFinished = SHAPE::kRound / SHAPE::kUnit;
    const int mine = SHAPE::kColumns == 1 ? SHAPE::kUnit * warp : warp;
    const int fragment = first + mine, turn = pass.begin + fragment / SHAPE::kColumns, column = fragment % SHAPE::kColumns;
    if (warp >= kFinished || fragment >= SHAPE::kFragments || turn >= pass.end) return;
    const int row = strip_of_turn<SHAPE>(p, turn) * 16;
    float values[4];
    finish_fragment(mine, row, values);
    if constexpr (SHAPE::kIsGated) {
      float up[4];
      finish_fragment(mine + SHAPE::kColumns, row + p.out_features / 2, up);
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] = silu(values[e]) * up[e];
    }
    const int width = p.out_features / SHAPE::kUnit;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = token_of(column, e);
      if (token < p.num_tokens) {
        static_cast<Out*>(p.out)[int64_t{token} * width + row + lane / 4 + e / 2 * 8] = from_float<Out>(values[e]);
      }
    }
  }

  __device__ __forceinline__ int token_of(int column, int e) const { return column * 8 + lane % 4 * 2 + e % 2; }

  // The sum over the warps of a fragment of the round, of rows of the weight from `row` on, scaled and biased.
  __device__ __forceinline__ void finish_fragment(int index, int row, float (&values)[4]) const {
    float sum[4] = {};
#pragma unroll
    for (int source = 0; source < SHAPE::kWarps; ++source) {
      const float4 part = exchange[(source * SHAPE::kRound + index) * 32 + lane];
      sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = row + lane / 4 + e / 2 * 8;
      values[e] = sum[e] * __ldg(p.channel_scale + at);
      if (p.bias != nullptr) values[e] += to_float(static_cast<const Out*>(p.bias)[at]);
    }
  }
};

template <typename SHAPE>
__device__ __forceinline__ void multiply_strips(const Int4RowsParams& p, char* memory, uint32_t ring,
                                                uint32_t barriers) {
  RowsConsumer<SHAPE> consumer{p, ring, barriers};
  const RowsEpilogue<SHAPE> epilogue{p, reinterpret_cast<float4*>(memory + SHAPE::kSumOffset)};
  consumer.x.load(p, consumer.warp);
  const UnitRange cta = strips_of_cta<SHAPE>(p);
#pragma unroll 1
  for (int begin = cta.begin; begin < cta.end; begin += SHAPE::kTiles) {
    const UnitRange pass{begin, min(begin + SHAPE::kTiles, cta.end)};
    RowSums<SHAPE> sums;
    consumer.consume_pass(pass.size(), sums);
    epilogue.write(pass, sums);
  }
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, SHAPE::kCtasPerSm)
    int4_rows_kernel(const __grid_constant__ Int4RowsParams p) {
  extern __shared__ __align__(128) char memory[];
  const uint32_t ring = shared_address(memory), barriers = ring + SHAPE::kBarrierOffset;
  start_dependents();
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < SHAPE::kSlots; ++slot) {
      init_barrier(barriers + 16 * slot, 1);
      init_barrier(barriers + 16 * slot + 8, SHAPE::kWarps);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x / 32 >= SHAPE::kWarps) {
    fill_ring<SHAPE>(p, ring, barriers);
    await_previous();
    return;
  }
  await_previous();
  multiply_strips<SHAPE>(p, memory, ring, barriers);
}

template <int TILES, int COLUMNS, int GROUPS, bool IS_GATED>
cudaError_t launch_variant(const Int4RowsParams& params, cudaStream_t stream) {
  using Shape = RowsShape<SLIPSTREAM_INPUT, TILES, COLUMNS, GROUPS, IS_GATED>;
  return launch_shape<Shape, int4_rows_kernel<Shape>>(params, params.num_ctas, stream);
}

template <int TILES, int COLUMNS, bool IS_GATED>
cudaError_t launch_groups(const Int4RowsParams& params, cudaStream_t stream) {
  if (params.groups_per_block == 1) return launch_variant<TILES, COLUMNS, 1, IS_GATED>(params, stream);
  if (params.groups_per_block == 2) return launch_variant<TILES, COLUMNS, 2, IS_GATED>(params, stream);
  return cudaErrorInvalidValue;
}

// The most strips that one CTA has.
int strips_of_largest(const Int4RowsParams& params, int unit) {
  const int num_sms = params.num_ctas / params.ctas_per_sm, units = params.out_features / (16 * unit);
  const int of_sm = (units + num_sms - 1) / num_sms;
  return (of_sm + params.ctas_per_sm - 1) / params.ctas_per_sm * unit;
}

template <int COLUMNS>
cudaError_t launch_tiles(const Int4RowsParams& params, cudaStream_t stream) {
  if (params.is_gated != 0) {
    if (params.out_features % 32 != 0) return cudaErrorInvalidValue;
    if (strips_of_largest(params, 2) <= 2) return launch_groups<2, COLUMNS, true>(params, stream);
    return launch_groups<4, COLUMNS, true>(params, stream);
  }
  const int strips = strips_of_largest(params, 1);
  if (strips <= 2) return launch_groups<2, COLUMNS, false>(params, stream);
  if (strips == 3) return launch_groups<3, COLUMNS, false>(params, stream);
  return launch_groups<4, COLUMNS, false>(params, stream);
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_int4_rows(const slipstream::Int4RowsParams* params, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int of_sm = params->ctas_per_sm;
  if (of_sm < 1 || of_sm > 2 || params->num_ctas < of_sm || params->num_ctas % of_sm != 0) return cudaErrorInvalidValue;
  if (params->columns == 8) return slipstream::launch_tiles<1>(*params, cuda_stream);
  if (params->columns == 16) return slipstream::launch_tiles<2>(*params, cuda_stream);
  return cudaErrorInvalidValue;
}
