// Products of at most 16 tokens with 4-bit weights, for Hopper (sm_90a). Contract: gemm/int4_mm.py.
//
// The time is that of reading the weights. One or two persistent CTAs an SM stream equal numbers of tiles of output
// features (skinny_gemm_w4a16_shape.cuh) through a ring in shared memory, which one warp fills by bulk copies; 8 warps
// multiply 16 output features by 8 tokens at a time (skinny_gemm_w4a16_multiply.cuh) and add their sums at the end. The
// kernel starts while the one before it still runs, and fills its ring before it waits for that kernel's results. Built
// once per SLIPSTREAM_INPUT: __nv_bfloat16 or __half.

#include "ptx/bulk_copy.cuh"
#include "ptx/dependent_launch.cuh"
#include "mma/skinny_gemm_w4a16_multiply.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"

namespace slipstream {

// One copy of weights and one of scales: the copy engine takes some 85 clocks for each of any size.
template <typename SHAPE>
__device__ __forceinline__ void copy_stage(const SkinnyGemmW4A16Params& p, uint32_t stage, uint32_t full, int tile,
                                           int chunk, uint64_t policy) {
  const int first = chunk * SHAPE::kWarps, blocks = min(SHAPE::kWarps, num_blocks(p) - first);
  const int scale_bytes = (p.is_channelwise != 0 ? 1 : blocks) * SHAPE::kScaleBytes;
  arrive_expecting(full, blocks * SHAPE::kBlockBytes + scale_bytes);
  const int64_t block = int64_t{tile} * num_blocks(p) + first;
  copy_bulk(stage, reinterpret_cast<const char*>(p.qweight) + block * SHAPE::kBlockBytes, blocks * SHAPE::kBlockBytes, full,
            policy);
  const char* scales = reinterpret_cast<const char*>(p.tile_scales);
  const int64_t group = p.is_channelwise != 0 ? tile : block;
  copy_bulk(stage + SHAPE::kScaleOffset, scales + group * SHAPE::kScaleBytes, scale_bytes, full, policy);
}

template <typename SHAPE>
__device__ __forceinline__ void produce(const SkinnyGemmW4A16Params& p, uint32_t ring, uint32_t barriers) {
  if (threadIdx.x % 32 != 0) return;
  const WorkRange cta = tiles_of_cta<SHAPE>(p);
  const int chunks = num_chunks<SHAPE>(p);
  const uint64_t policy = evict_first_policy();
  PipelineState<SHAPE::kStages> state;
  for (int begin = cta.begin; begin < cta.end; begin += SHAPE::kTiles) {
    const int end = min(begin + SHAPE::kTiles, cta.end);
    for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll 1
      for (int tile = begin; tile < end; ++tile, state.advance()) {
        const uint32_t full = barriers + 16 * state.stage;
        wait_barrier(full + 8, state.parity ^ 1);
        copy_stage<SHAPE>(p, ring + state.stage * SHAPE::kStageBytes, full, tile_at<SHAPE>(p, tile), chunk, policy);
      }
    }
  }
}

// Adds the warps' sums through shared memory, scales, biases and writes them.
template <typename SHAPE>
struct SkinnyGemmW4A16Epilogue {
  using Out = typename SHAPE::Operand;
  const SkinnyGemmW4A16Params& p;
  float4* exchange;   // shared: [warp][fragment of the round][lane]
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ __forceinline__ void write(const WorkRange& pass, const SkinnyGemmW4A16Sums<SHAPE>& sums) const {
#pragma unroll
    for (int first = 0; first < SHAPE::kFragments; first += SHAPE::kRound) {
      sync_threads(1, 32 * SHAPE::kWarps);   // the sums of the round before have been read
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
  // A warp finishes a fragment; gated, one of a gate tile and the same one of the up tile behind it.
  __device__ __forceinline__ void finish_round(const WorkRange& pass, int first) const {
    constexpr int kFinished = SHAPE::kRound / SHAPE::kItemTiles;
    const int mine = SHAPE::kColumns == 1 ? SHAPE::kItemTiles * warp : warp;
    const int fragment = first + mine, index = pass.begin + fragment / SHAPE::kColumns, column = fragment % SHAPE::kColumns;
    if (warp >= kFinished || fragment >= SHAPE::kFragments || index >= pass.end) return;
    const int row = tile_at<SHAPE>(p, index) * 16;
    float values[4];
    finish_fragment(mine, row, values);
    if constexpr (SHAPE::kIsGated) {
      float up[4];
      finish_fragment(mine + SHAPE::kColumns, row + p.out_features / 2, up);
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] = silu(values[e]) * up[e];
    }
    const int width = p.out_features / SHAPE::kItemTiles;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = token_of(column, e);
      if (token < p.num_tokens) {
        static_cast<Out*>(p.out)[int64_t{token} * width + row + lane / 4 + e / 2 * 8] = from_float<Out>(values[e]);
      }
    }
  }

  __device__ __forceinline__ int token_of(int column, int e) const { return column * 8 + lane % 4 * 2 + e % 2; }

  // Adds the warps' sums of a fragment of the round, scales and biases them. row: its first row of the weight.
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
__device__ __forceinline__ void multiply_tiles(const SkinnyGemmW4A16Params& p, char* memory, uint32_t ring,
                                                uint32_t barriers) {
  SkinnyGemmW4A16Consumer<SHAPE> consumer{p, ring, barriers};
  const SkinnyGemmW4A16Epilogue<SHAPE> epilogue{p, reinterpret_cast<float4*>(memory + SHAPE::kSumOffset)};
  consumer.x.load(p, consumer.warp);
  const WorkRange cta = tiles_of_cta<SHAPE>(p);
#pragma unroll 1
  for (int begin = cta.begin; begin < cta.end; begin += SHAPE::kTiles) {
    const WorkRange pass{begin, min(begin + SHAPE::kTiles, cta.end)};
    SkinnyGemmW4A16Sums<SHAPE> sums;
    consumer.consume_pass(pass.size(), sums);
    epilogue.write(pass, sums);
  }
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, SHAPE::kCtasPerSm)
    skinny_gemm_w4a16_kernel(const __grid_constant__ SkinnyGemmW4A16Params p) {
  extern __shared__ __align__(128) char memory[];
  const uint32_t ring = shared_address(memory), barriers = ring + SHAPE::kBarrierOffset;
  start_dependents();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < SHAPE::kStages; ++stage) {
      init_barrier(barriers + 16 * stage, 1);
      init_barrier(barriers + 16 * stage + 8, SHAPE::kWarps);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x / 32 >= SHAPE::kWarps) {
    produce<SHAPE>(p, ring, barriers);
    await_previous();
    return;
  }
  await_previous();
  multiply_tiles<SHAPE>(p, memory, ring, barriers);
}

template <int TILES, int COLUMNS, int GROUPS, bool IS_GATED>
cudaError_t launch_variant(const SkinnyGemmW4A16Params& params, cudaStream_t stream) {
  using Shape = SkinnyGemmW4A16Shape<SLIPSTREAM_INPUT, TILES, COLUMNS, GROUPS, IS_GATED>;
  return launch_shape<Shape, skinny_gemm_w4a16_kernel<Shape>>(params, params.num_ctas, stream);
}

template <int TILES, int COLUMNS, bool IS_GATED>
cudaError_t launch_groups(const SkinnyGemmW4A16Params& params, cudaStream_t stream) {
  if (params.groups_per_block == 1) return launch_variant<TILES, COLUMNS, 1, IS_GATED>(params, stream);
  if (params.groups_per_block == 2) return launch_variant<TILES, COLUMNS, 2, IS_GATED>(params, stream);
  return cudaErrorInvalidValue;
}

// The largest number of tiles of a CTA.
int max_tiles_of_cta(const SkinnyGemmW4A16Params& params, int item_tiles) {
  const int num_sms = params.num_ctas / params.ctas_per_sm, items = params.out_features / (16 * item_tiles);
  const int of_sm = (items + num_sms - 1) / num_sms;
  return (of_sm + params.ctas_per_sm - 1) / params.ctas_per_sm * item_tiles;
}

template <int COLUMNS>
cudaError_t launch_tiles(const SkinnyGemmW4A16Params& params, cudaStream_t stream) {
  if (params.is_gated != 0) {
    if (params.out_features % 32 != 0) return cudaErrorInvalidValue;
    if (max_tiles_of_cta(params, 2) <= 2) return launch_groups<2, COLUMNS, true>(params, stream);
    return launch_groups<4, COLUMNS, true>(params, stream);
  }
  const int tiles = max_tiles_of_cta(params, 1);
  if (tiles <= 2) return launch_groups<2, COLUMNS, false>(params, stream);
  if (tiles == 3) return launch_groups<3, COLUMNS, false>(params, stream);
  return launch_groups<4, COLUMNS, false>(params, stream);
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_skinny_gemm_w4a16(const slipstream::SkinnyGemmW4A16Params* params, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int of_sm = params->ctas_per_sm;
  if (of_sm < 1 || of_sm > 2 || params->num_ctas < of_sm || params->num_ctas % of_sm != 0) return cudaErrorInvalidValue;
  if (params->columns == 8) return slipstream::launch_tiles<1>(*params, cuda_stream);
  if (params->columns == 16) return slipstream::launch_tiles<2>(*params, cuda_stream);
  return cudaErrorInvalidValue;
}
