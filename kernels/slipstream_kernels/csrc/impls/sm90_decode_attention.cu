// Attention of decode and verify rows over a paged KV cache, for Hopper (sm_90a). Contract: attention/decode_attention.py.
//
// The keys of all requests form one line of tiles, cut into equal shares, one per CTA (decode_work.cuh). Each warp of a
// CTA streams its own tiles through a ring in shared memory (decode_stream.cuh) and multiplies K (as 16 tokens x dims)
// by q^T (dims x 8 rows), then V^T by the probabilities: with the keys on the 16-row side of the product, the queries
// of one GQA group fill its 8-wide side, and a lone MHA row costs no more per byte. Bytes of K and V are the bound;
// arithmetic is to hide under them. Row, lane and register maps: kv_format.cuh, decode_softmax.cuh.
//
// Built once per SLIPSTREAM_QUERY (__half, __nv_bfloat16), SLIPSTREAM_KV (KvType) and SLIPSTREAM_HEAD_DIM.

#include <cuda_runtime.h>

#include <type_traits>

#include "epilogue/decode_merge.cuh"
#include "pipeline/decode_stream.cuh"
#include "ptx/dependent_launch.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"

namespace slipstream {

// The rows of q of one tile, on their way from global memory to operand fragments.
template <typename SHAPE>
struct QueryRows {
  using Value = typename SHAPE::Output;
  static constexpr int kFragments = SHAPE::kNumN * SHAPE::kSteps * 32;
  static constexpr int kItems = (kFragments + SHAPE::kThreads - 1) / SHAPE::kThreads;
  Value values[kItems][4];

  // Zeros beyond rows and dims.
  __device__ __forceinline__ void load(const DecodeParams& p, const Segment& segment) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = i * SHAPE::kThreads + threadIdx.x;
      const int lane = item % 32, step = item / 32 % SHAPE::kSteps, n = item / 32 / SHAPE::kSteps;
      const int row = segment.row_tile * SHAPE::kRows + 8 * n + lane / 4;
      const Value* q = static_cast<const Value*>(p.q) + (segment.work.start + row / p.group) * p.q_token_stride +
                       (segment.kv_head * p.group + row % p.group) * p.q_head_stride;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int dim = SHAPE::Format::query_dim(step, lane % 4, e / 2, e % 2);
        const bool is_inside = item < kFragments && row < segment.work.query_len * p.group && dim < SHAPE::kHeadDim;
        values[i][e] = is_inside ? q[dim] : Value(0.0f);
      }
    }
  }

  // fragments: shared, [n][step][lane] pairs of registers.
  __device__ __forceinline__ void store(uint2* fragments) const {
    using Operand = typename SHAPE::Operand;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = i * SHAPE::kThreads + threadIdx.x;
      float numbers[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        numbers[e] = to_float(values[i][e]);
        if constexpr (SHAPE::Format::kIsInteger) numbers[e] *= SHAPE::Format::query_factor(e / 2);
      }
      if (item < kFragments) {
        fragments[item] = make_uint2(pack<Operand>(numbers[0], numbers[1]), pack<Operand>(numbers[2], numbers[3]));
      }
    }
  }
};

// Calls use(step, operand) for each product of 16 dims that the 16 tokens at `rows` feed.
template <typename SHAPE, bool IS_VALUE, typename USE>
__device__ __forceinline__ void for_each_step(uint32_t rows, USE use) {
  using Format = typename SHAPE::Format;
  const int lane = threadIdx.x % 32;
  const uint32_t address = rows + lane % 16 * SHAPE::kStride + lane / 16 * 16;
#pragma unroll
  for (int pair = 0; pair < SHAPE::kPairs; ++pair) {
    uint32_t words[4];
    const bool is_whole = 2 * pair + 1 < SHAPE::kColumns;
    if (is_whole) load_matrices_x4<IS_VALUE>(words, address + 32 * pair);
    else load_matrices_x2<IS_VALUE>(words, address + 32 * pair - lane / 16 * 16);
#pragma unroll
    for (int step = 0; step < (is_whole ? Format::kStepsPerPair : Format::kStepsPerPair / 2); ++step) {
      uint32_t operand[4];
      if constexpr (IS_VALUE) Format::values(words, step, operand);
      else Format::keys(words, step, operand);
      use(pair * Format::kStepsPerPair + step, operand);
    }
  }
}

// The offset of an integer cache adds to each row's products: kOffset * sum of q, as the operands hold it.
template <typename SHAPE>
struct QueryOffsets {
  float value[SHAPE::kNumN][2];

  __device__ __forceinline__ void load(const uint2* queries) {
    if constexpr (SHAPE::Format::kIsInteger) {
      const float low = SHAPE::Format::kOffset, high = low / SHAPE::Format::query_factor(1);
      const uint32_t offsets[4] = {pack<__half>(low, low), pack<__half>(low, low), pack<__half>(high, high),
                                   pack<__half>(high, high)};
#pragma unroll
      for (int n = 0; n < SHAPE::kNumN; ++n) {
        float sums[4] = {};
#pragma unroll
        for (int step = 0; step < SHAPE::kSteps; ++step) {
          const uint2 query = queries[(n * SHAPE::kSteps + step) * 32 + threadIdx.x % 32];
          multiply_add<__half>(sums, offsets, query.x, query.y);
        }
        value[n][0] = sums[0], value[n][1] = sums[1];
      }
    }
  }
};

template <typename SHAPE>
struct Tile {
  const DecodeParams& p;
  const Segment& segment;
  const RowFacts<SHAPE::kNumN>& facts;
  const QueryOffsets<SHAPE>& offsets;
  const uint2* queries;   // shared
  float scale;            // of raw products, the cache's per-head scale included

  // Adds one tile of 16 tokens to the state. stage: its shared address; first_token: its position.
  __device__ __forceinline__ void attend(const char* stage, int first_token, RowState<SHAPE>& state) const {
    float scores[SHAPE::kNumN][4];
    multiply_keys(shared_address(stage), scores);
    const int i = threadIdx.x % 32 / 4;
    const float* scales = reinterpret_cast<const float*>(stage + SHAPE::kScaleOffset);
    if constexpr (SHAPE::Format::kIsInteger) {
#pragma unroll
      for (int n = 0; n < SHAPE::kNumN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[n][e] = scores[n][e] * kSubnormalUnit - offsets.value[n][e % 2];
      }
      multiply_rows(scales[i], scales[i + 8], scores);
    }
    scale_scores(p, scale, scores);
    const int prefix = segment.work.seq_len - segment.work.query_len;
    if (first_token + kTileTokens > prefix || p.sliding_window > 0 || p.alibi_slopes != nullptr) {
      mask_scores(p, segment, facts, first_token, scores);
    }
    state.follow(scores);
#pragma unroll
    for (int n = 0; n < SHAPE::kNumN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[n][e] = exp2_fast(scores[n][e] - state.maximum[n][e % 2]);
        state.normaliser[n][e % 2] += scores[n][e];
      }
    }
    if constexpr (SHAPE::Format::kIsInteger) {
      multiply_rows(scales[16 + i] * kOperandBoost, scales[24 + i] * kOperandBoost, scores);
    }
    multiply_values(shared_address(stage) + kTileTokens * SHAPE::kStride, scores, state);
  }

 private:
  static __device__ __forceinline__ void multiply_rows(float low, float high, float (&scores)[SHAPE::kNumN][4]) {
#pragma unroll
    for (int n = 0; n < SHAPE::kNumN; ++n) {
      scores[n][0] *= low, scores[n][1] *= low, scores[n][2] *= high, scores[n][3] *= high;
    }
  }

  __device__ __forceinline__ void multiply_keys(uint32_t rows, float (&scores)[SHAPE::kNumN][4]) const {
    // Two sums for even and odd steps halve the chain of dependent products.
    float parts[2][SHAPE::kNumN][4] = {};
    for_each_step<SHAPE, false>(rows, [&](int step, const uint32_t(&keys)[4]) {
#pragma unroll
      for (int n = 0; n < SHAPE::kNumN; ++n) {
        const uint2 query = queries[(n * SHAPE::kSteps + step) * 32 + threadIdx.x % 32];
        multiply_add<typename SHAPE::Operand>(parts[step % 2][n], keys, query.x, query.y);
      }
    });
#pragma unroll
    for (int n = 0; n < SHAPE::kNumN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] = parts[0][n][e] + parts[1][n][e];
    }
  }

  __device__ __forceinline__ void multiply_values(uint32_t rows, const float (&probs)[SHAPE::kNumN][4],
                                                  RowState<SHAPE>& state) const {
    using Operand = typename SHAPE::Operand;
    uint32_t low[SHAPE::kNumN], high[SHAPE::kNumN];
#pragma unroll
    for (int n = 0; n < SHAPE::kNumN; ++n) {
      const uint32_t packed[2] = {pack<Operand>(probs[n][0], probs[n][1]), pack<Operand>(probs[n][2], probs[n][3])};
      if constexpr (SHAPE::Format::kIsInteger) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 rounded = __half22float2(*reinterpret_cast<const __half2*>(&packed[h]));
          state.operand_sum[n][0] += rounded.x, state.operand_sum[n][1] += rounded.y;
        }
      }
      low[n] = transpose_8x8(packed[0]);
      high[n] = transpose_8x8(packed[1]);
    }
    for_each_step<SHAPE, true>(rows, [&](int step, const uint32_t(&values)[4]) {
#pragma unroll
      for (int n = 0; n < SHAPE::kNumN; ++n) multiply_add<Operand>(state.out[n][step], values, low[n], high[n]);
    });
  }
};

// Zeros to the rows of requests that have no units, a CTA for each. ends: of count_tiles.
template <typename SHAPE>
__device__ __forceinline__ void clear_padding(const DecodeParams& p, const int* ends) {
  const int64_t pieces = int64_t{p.num_kv_heads} * p.group * SHAPE::kHeadDim * sizeof(typename SHAPE::Output) / 16;
#pragma unroll 1
  for (int request = blockIdx.x; request < p.num_requests; request += gridDim.x) {
    if (ends[request] > (request == 0 ? 0 : ends[request - 1])) continue;
    uint4* out = static_cast<uint4*>(p.out);
    const int64_t end = p.query_start_loc[request + 1] * pieces;
    for (int64_t i = p.query_start_loc[request] * pieces + threadIdx.x; i < end; i += SHAPE::kThreads) out[i] = uint4{};
  }
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, SHAPE::kCtas)
    decode_attention_kernel(const __grid_constant__ DecodeParams p) {
  start_dependents();
  extern __shared__ __align__(16) char memory[];
  uint2* queries = reinterpret_cast<uint2*>(memory + SHAPE::kQueryOffset);
  int* ends = reinterpret_cast<int*>(memory + SHAPE::kEndsOffset);
  const int warp = threadIdx.x / 32, cta = blockIdx.x;
  char* ring = memory + warp * SHAPE::kStages * SHAPE::kStageBytes;

  count_tiles<SHAPE::kRows, SHAPE::kUnitCost, SHAPE::kThreads>(p, ends);
  const int total = ends[p.num_requests - 1];
  // A warp has its first tiles on their way at once, so sharing them with fewer others costs nothing and spares
  // merging.
  const int grid = gridDim.x, share = max((total + grid - 1) / grid, SHAPE::kWarps * (SHAPE::kStages - 1));
  typename SHAPE::Walk walk = share_of<typename SHAPE::Walk>(cta, share, total, ends, p.num_requests);

  TileStream<SHAPE> stream(p, ends, walk, shared_address(ring));
  int ahead = 0;
  if (p.is_prefix_settled) {
#pragma unroll 1
    for (; ahead < SHAPE::kStages - 1 && stream.is_next_settled(); ++ahead) stream.copy_next(ahead);
  }
  await_previous();
#pragma unroll 1
  for (; ahead < SHAPE::kStages - 1; ++ahead) stream.copy_next(ahead);
  clear_padding<SHAPE>(p, ends);

  Merge<SHAPE> merge{p, reinterpret_cast<float*>(memory + SHAPE::kRoundOffset),
                     reinterpret_cast<float2*>(memory + SHAPE::kStateOffset)};
  RowFacts<SHAPE::kNumN> facts;
  QueryOffsets<SHAPE> offsets;
  RowState<SHAPE> state;
  QueryRows<SHAPE> rows;
  Segment segment, following;   // following: only where its queries are loaded early
  bool is_more = false;
  const auto load_early = [&] {
    is_more = walk.advance(p, ends, following);
    if (is_more) rows.load(p, following);
  };
  if constexpr (SHAPE::kLoadsQueriesEarly) load_early();
  int stage = 0, free_stage = SHAPE::kStages - 1;
#pragma unroll 1
  while (true) {
    if constexpr (SHAPE::kLoadsQueriesEarly) {
      if (!is_more) break;
      segment = following;
    } else {
      if (!walk.advance(p, ends, segment)) break;
      rows.load(p, segment);
    }
    rows.store(queries);
    facts.load(p, segment);
    state.clear();
    float scale = p.scale;
    if (!SHAPE::Format::kIsInteger && p.key_scale != nullptr) scale *= p.key_scale[segment.kv_head];
    __syncthreads();
    offsets.load(queries);
    const Tile<SHAPE> tile{p, segment, facts, offsets, queries, scale};
#pragma unroll 1
    for (int index = segment.begin + warp; index < segment.end; index += SHAPE::kWarps) {
      wait_for_copies<SHAPE::kStages - 2>();
      __syncwarp();
      stream.copy_next(free_stage);
      tile.attend(ring + stage * SHAPE::kStageBytes, (segment.work.first_tile + index) * kTileTokens, state);
      free_stage = stage;
      stage = stage + 1 == SHAPE::kStages ? 0 : stage + 1;
    }
    if constexpr (SHAPE::kLoadsQueriesEarly) load_early();
    merge.write(state, segment, Destination(segment, share, cta));
  }
}

template <int NUM_N>
cudaError_t launch(const DecodeParams& params, cudaStream_t stream) {
  using Shape = DecodeShape<SLIPSTREAM_QUERY, static_cast<KvType>(SLIPSTREAM_KV), SLIPSTREAM_HEAD_DIM, NUM_N>;
  return launch_shape<Shape, decode_attention_kernel<Shape>>(params, params.num_sms * Shape::kCtas, stream);
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_decode_attention(const DecodeParams* params, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (params->rows == 8) return slipstream::launch<1>(*params, cuda_stream);
  if (params->rows == 16) return slipstream::launch<2>(*params, cuda_stream);
#if SLIPSTREAM_HEAD_DIM <= 128
  if (params->rows == 24) return slipstream::launch<3>(*params, cuda_stream);
  if (params->rows == 32) return slipstream::launch<4>(*params, cuda_stream);
#endif
  return cudaErrorInvalidValue;
}
