// Causal attention of long queries (prompts and chunks of them) over a paged KV cache, for Hopper (sm_90a).
// Contract: ops/paged_attention.py.
//
// A CTA has one loading warp (prefill_load.cuh) and warpgroups of 64 query rows each. While a warpgroup computes the
// softmax of one tile of scores, the tensor cores multiply the values of its last one, and what the other warpgroups
// ask for (FlashAttention-3, arXiv:2407.08608; their turns by barriers gained nothing here). Keys are walked from the
// last tile, which has a mask, to the first. Rows are (token, query head of one kv head) pairs.
//
// Built once per SLIPSTREAM_TYPE (__half, __nv_bfloat16), SLIPSTREAM_KV (KvType), SLIPSTREAM_HEAD_DIM,
// SLIPSTREAM_SOFT_CAP and SLIPSTREAM_ALIBI.

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "prefill_convert.cuh"
#include "prefill_load.cuh"
#include "prefill_softmax.cuh"

namespace slipstream {

// Named barriers: one per warpgroup.
constexpr int kWarpgroupBarrier = 1;

template <typename SHAPE>
struct Multiplier {
  using Element = typename SHAPE::Element;
  using Operand = typename SHAPE::Operand;
  static constexpr int kScores = SHAPE::kKeys / 2;
  static constexpr int kOutputs = SHAPE::kHeadDim / 2;

  const PrefillParams& p;
  PrefillMemory<SHAPE> memory;
  int warpgroup;
  RingPlace<SHAPE::kStages> key_place, value_place;
  RingPlace<2> slot;
  RingPlace<1> query_place;
  Work work;
  RowFacts facts;
  RowState state;
  float out[kOutputs];
  float scores[kScores];
  uint32_t probs[kScores / 2];

  __device__ __forceinline__ void run() {
#pragma unroll 1
    while (receive()) {
      attend();
      store();
    }
  }

 private:
  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (threadIdx.x % 32 == 0) arrive(barrier);
  }

  __device__ __forceinline__ bool receive() {
    work = memory.receive(slot);
    return work.head >= 0;
  }

  __device__ __forceinline__ void attend() {
    state = RowState();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
    if (work.begin_tile >= work.end_tile) return;
    facts.load<SHAPE::kHasAlibi>(p, work, warpgroup);
    facts.scale = p.scale * head_scale(p.key_scale);
    const int first_position = work.seq_len - work.query_len + (work.first_row >> p.pack_log2);
    const int last_position = work.seq_len - work.query_len + ((work.first_row + SHAPE::kRows - 1) >> p.pack_log2);
    // Tiles in [whole_begin, whole_end) hide no key from any row.
    const int whole_end = (first_position + 1) / SHAPE::kKeys;
    const int whole_begin =
        p.sliding_window > 0 ? (max(last_position - p.sliding_window + 1, 0) + SHAPE::kKeys - 1) / SHAPE::kKeys : 0;
    begin();
#pragma unroll 1
    for (int tile = work.end_tile - 2; tile >= work.begin_tile; --tile) {
      step(tile, tile >= whole_end || tile < whole_begin);
    }
    wait_barrier(memory.value_full(value_place.stage), value_place.parity);
    multiply_values();
    wait_for_products<0>();
    pin(out);
    release(memory.value_empty(value_place.stage));
    value_place.advance();
  }

  __device__ __forceinline__ float head_scale(const float* scales) const {
    if (SHAPE::kKvType != KvType::kFp8E4m3 || scales == nullptr) return 1.0f;
    return scales[(work.head << p.pack_log2) / (p.num_q_heads / p.num_kv_heads)];
  }

  // The last tile's scores: nothing to overlap them with.
  __device__ __forceinline__ void begin() {
    wait_barrier(memory.query_full(), query_place.parity);
    query_place.advance();
    if constexpr (!std::is_same_v<Element, Operand>) convert_queries();
    wait_barrier(memory.key_full(key_place.stage), key_place.parity);
    multiply_scores();
    wait_for_products<0>();
    pin(scores);
    const int tile = work.end_tile - 1;
    if (tile == work.begin_tile) release(memory.query_empty());
    release(memory.key_empty(key_place.stage));
    key_place.advance();
    float rescale[2];
    follow(tile, true, rescale);
    pack_probs();
    const bool has_tail = work.seq_len % (1 << p.block_size_log2) != 0 && work.seq_len < work.end_tile * SHAPE::kKeys;
    if (!SHAPE::kIsQuantized && has_tail) clear_tail(tile);
  }

  __device__ __forceinline__ void step(int tile, bool is_masked) {
    wait_barrier(memory.key_full(key_place.stage), key_place.parity);
    multiply_scores();
    wait_barrier(memory.value_full(value_place.stage), value_place.parity);
    multiply_values();
    wait_for_products<1>();
    pin(scores);
    if (tile == work.begin_tile) release(memory.query_empty());
    release(memory.key_empty(key_place.stage));
    key_place.advance();
    float rescale[2];
    follow(tile, is_masked, rescale);
    wait_for_products<0>();
    pin(out);
    pin(probs);
    release(memory.value_empty(value_place.stage));
    value_place.advance();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] *= rescale[i / 2 % 2];
    pack_probs();
  }

  __device__ __forceinline__ void follow(int tile, bool is_masked, float (&rescale)[2]) {
    const int first_key = tile * SHAPE::kKeys;
    const float factor = finish_scores<SHAPE::kHasSoftCap, SHAPE::kHasAlibi>(p, facts, first_key, scores);
    if (is_masked) mask_scores(p, facts, first_key, scores);
    state.follow(scores, factor, rescale);
  }

  __device__ __forceinline__ void multiply_scores() {
    const uint64_t queries = rows_operand(memory.queries() + warpgroup * 64 * kSwizzleBytes);
    const uint64_t keys = rows_operand(memory.keys(key_place.stage));
    pin(scores);
    begin_products();
#pragma unroll
    for (int k = 0; k < SHAPE::kHeadDim / 16; ++k) {
      const uint64_t query = queries + ((k / 4 * SHAPE::kQuerySlab + k % 4 * 32) >> 4);
      const uint64_t key = keys + ((k / 4 * SHAPE::kKeySlab + k % 4 * 32) >> 4);
      if (k == 0) multiply_rows<Operand, false>(scores, query, key);
      else multiply_rows<Operand, true>(scores, query, key);
    }
    commit_products();
  }

  __device__ __forceinline__ void multiply_values() {
    const uint64_t values = columns_operand(memory.values(value_place.stage), SHAPE::kKeySlab);
    pin(out);
    pin(probs);
    begin_products();
#pragma unroll
    for (int k = 0; k < SHAPE::kKeys / 16; ++k) {
      multiply_columns<Operand>(out, probs + 4 * k, values + ((k * 16 * kSwizzleBytes) >> 4));
    }
    commit_products();
  }

  // Probabilities in the layout of a wgmma operand in registers: pairs of the accumulator's columns.
  __device__ __forceinline__ void pack_probs() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) probs[i] = pack<Operand>(scores[2 * i], scores[2 * i + 1]);
  }

  // This warpgroup's rows from bf16 to fp16, where they lie.
  __device__ __forceinline__ void convert_queries() {
    for (int i = threadIdx.x % 128; i < 64 * 8 * SHAPE::kSlabs; i += 128) {
      const int slab = i / (64 * 8), part = i % (64 * 8);
      auto* words = reinterpret_cast<uint4*>(memory.pointer(
          memory.queries() + slab * SHAPE::kQuerySlab + warpgroup * 64 * kSwizzleBytes + part * 16));
      const uint4 old = *words;
      const auto convert = [](uint32_t pair) {
        return pack<Operand>(__uint_as_float(pair << 16), __uint_as_float(pair & ~0xffffu));
      };
      *words = make_uint4(convert(old.x), convert(old.y), convert(old.z), convert(old.w));
    }
    fence_shared_for_engines();
    sync_threads(kWarpgroupBarrier + warpgroup, 128);
  }

  // Slots of the last block that the sequence has not reached may hold NaN, which a probability of 0 would not stop.
  // Every warpgroup clears them for itself: all write the same.
  __device__ __forceinline__ void clear_tail(int tile) {
    wait_barrier(memory.value_full(value_place.stage), value_place.parity);
    const int block_mask = (1 << p.block_size_log2) - 1;
    const int first = work.seq_len - tile * SHAPE::kKeys;
    const int end = min(((work.seq_len + block_mask) & ~block_mask) - tile * SHAPE::kKeys, SHAPE::kKeys);
    char* values = memory.pointer(memory.values(value_place.stage));
    for (int i = threadIdx.x % 128; i < (end - first) * 8 * SHAPE::kSlabs; i += 128) {
      const int row = first + i / 8 / SHAPE::kSlabs, slab = i / 8 % SHAPE::kSlabs;
      *reinterpret_cast<uint4*>(values + slab * SHAPE::kKeySlab + row * kSwizzleBytes + i % 8 * 16) = uint4{};
    }
    fence_shared_for_engines();
    sync_threads(kWarpgroupBarrier + warpgroup, 128);
  }

  __device__ __forceinline__ void store() const {
    Element* to[2];
    float inverse[2];
    bool is_row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      inverse[r] = state.inverse(r) * head_scale(p.value_scale);
      const int row = work.first_row + warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
      const int token = row >> p.pack_log2, head = (work.head << p.pack_log2) + (row & ((1 << p.pack_log2) - 1));
      is_row[r] = token < work.query_len;
      to[r] = static_cast<Element*>(p.out) +
              (static_cast<int64_t>(work.start + token) * p.num_q_heads + head) * SHAPE::kHeadDim;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int first = 0; first < SHAPE::kHeadDim / 8; first += 4) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = 4 * (first + j) + 2 * r;
          words[j] = pack<Element>(out[i] * inverse[r], out[i + 1] * inverse[r]);
        }
        transpose_in_quad(words);
        if (is_row[r]) {
          *reinterpret_cast<uint4*>(to[r] + 8 * (first + threadIdx.x % 4)) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  // Lane l's word j changes places with lane j's word l: each lane ends with 16 neighbouring bytes.
  static __device__ __forceinline__ void transpose_in_quad(uint32_t (&words)[4]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
      const bool is_upper = threadIdx.x & bit;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j & bit) continue;
        const uint32_t received = __shfl_xor_sync(~0u, is_upper ? words[j] : words[j + bit], bit);
        if (is_upper) words[j] = received;
        else words[j + bit] = received;
      }
    }
  }
};

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 1)
    prefill_attention_kernel(const __grid_constant__ PrefillParams p, const __grid_constant__ PrefillMaps maps) {
  extern __shared__ char shared[];
  const PrefillMemory<SHAPE> memory(shared);
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  // One value for the whole warp, so that the branch below is seen to be uniform.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    lower_registers<SHAPE::kLoadRegisters>();
    if (threadIdx.x / 32 == 0) PrefillLoader<SHAPE>{p, maps, memory}.run();
  } else if (warpgroup < SHAPE::kFirstMultiplier) {
    if constexpr (SHAPE::kIsQuantized) {
      lower_registers<SHAPE::kConvertRegisters>();
      PrefillConverter<SHAPE>{memory}.run();
    }
  } else {
    raise_registers<SHAPE::kRegisters>();
    Multiplier<SHAPE>{p, memory, warpgroup - SHAPE::kFirstMultiplier}.run();
  }
}

using Encode = decltype(&cuTensorMapEncodeTiled);

inline Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
  return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

struct Extent {
  uint64_t dims[3];
  uint64_t strides[2];   // bytes, of the outer two
  uint32_t box[3];
};

inline bool encode(CUtensorMap* map, CUtensorMapDataType type, const void* data, const Extent& extent) {
  static const Encode encode_tiled = find_encode();
  if (encode_tiled == nullptr) return false;
  const bool is_raw = type == CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const uint32_t ones[3] = {1, 1, 1};
  return encode_tiled(map, type, 3, const_cast<void*>(data), extent.dims, extent.strides, extent.box, ones,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, is_raw ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <typename SHAPE>
bool encode_maps(const PrefillParams& p, PrefillMaps* maps) {
  constexpr bool kIsHalf = std::is_same_v<typename SHAPE::Element, __half>;
  constexpr auto kType = kIsHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  constexpr auto kCacheType = SHAPE::kIsQuantized ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : kType;
  // Elements of a row of the cache, and their bytes; quantised ones count in bytes.
  constexpr uint64_t kRow = SHAPE::kIsQuantized ? SHAPE::kSlabs * SHAPE::kRawRowBytes : SHAPE::kHeadDim;
  constexpr uint64_t kRowBytes = SHAPE::kSlabs * SHAPE::kRawRowBytes;
  const uint64_t part_rows = 1 << std::min(p.block_size_log2, kMaxPartRowsLog2);
  const uint64_t num_parts = p.num_blocks * p.num_kv_heads * ((1 << p.block_size_log2) / part_rows);
  const uint32_t pack = 1 << p.pack_log2;
  const Extent cache{{kRow, part_rows, num_parts}, {kRowBytes, part_rows * kRowBytes},
                     {static_cast<uint32_t>(kRow) / SHAPE::kSlabs, static_cast<uint32_t>(part_rows), 1}};
  const Extent q{{SHAPE::kHeadDim, static_cast<uint64_t>(p.num_q_heads), static_cast<uint64_t>(p.num_tokens)},
                 {p.q_head_stride * sizeof(uint16_t), p.q_token_stride * sizeof(uint16_t)},
                 {64, pack, SHAPE::kRows / pack}};
  return encode(&maps->q, kType, p.q, q) && encode(&maps->keys, kCacheType, p.key_cache, cache) &&
         encode(&maps->values, kCacheType, p.value_cache, cache);
}

template <typename SHAPE>
cudaError_t launch(const PrefillParams& p, cudaStream_t stream) {
  PrefillMaps maps;
  if (!encode_maps<SHAPE>(p, &maps)) return cudaErrorInvalidValue;
  auto* kernel = prefill_attention_kernel<SHAPE>;
  constexpr int kBytes = PrefillMemory<SHAPE>::kAllocatedBytes;
  static const cudaError_t configured =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (configured != cudaSuccess) return configured;
  kernel<<<p.num_sms, SHAPE::kThreads, kBytes, stream>>>(p, maps);
  return cudaGetLastError();
}

}  // namespace slipstream

#define SLIPSTREAM_API extern "C" __attribute__((visibility("default")))

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_prefill_attention(const PrefillParams* params, void* stream) {
  using Shape = slipstream::PrefillShape<SLIPSTREAM_TYPE, static_cast<slipstream::KvType>(SLIPSTREAM_KV),
                                         SLIPSTREAM_HEAD_DIM, SLIPSTREAM_SOFT_CAP, SLIPSTREAM_ALIBI>;
  return slipstream::launch<Shape>(*params, static_cast<cudaStream_t>(stream));
}

SLIPSTREAM_API const char* slipstream_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
