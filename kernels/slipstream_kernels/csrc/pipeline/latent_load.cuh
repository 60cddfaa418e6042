// The loading warps of a CTA of latent attention: two threads stream keys, one queries, each slab as soon as its place in
// shared memory has been given back. A warp is left for the plan.
#pragma once

#include "ptx/bulk_copy.cuh"
#include "ptx/cluster.cuh"
#include "ptx/dependent_launch.cuh"
#include "schedule/latent_shape.cuh"
#include "schedule/latent_work.cuh"

namespace slipstream {

// Rows of queries [tokens x heads][576], rows of the cache [blocks x block_size][576]; boxes of 64 rows and columns.
// For 64 rows of queries its latents in boxes of two slabs, [blocks x block_size][9][64], and its rotated features. Of an FP8
// cache: its latents in boxes of 128 columns, its scales, its rotated features.
struct LatentMaps {
  CUtensorMap q;
  CUtensorMap cache;
  CUtensorMap scales;   // FP8 alone
  CUtensorMap rope;
};

// MEMORY: LatentMemory or NarrowMemory.
template <typename MEMORY>
struct LatentLoader {
  using Shape = LatentShape;
  using Walk = LatentWalk<Shape::kRows, Shape::kKeys>;

  const LatentParams& p;
  const LatentMaps& maps;
  MEMORY memory;

  // One thread: `load` with the first row in the cache of the unit's tiles first, first + STEP and so on, which it counts.
  template <int STEP, typename LOAD>
  __device__ __forceinline__ void for_tiles(Walk walk, int first, LOAD load) const {
    bool is_awaited = false;
    LatentWork work;
#pragma unroll 1
    while (walk.advance(work)) {
#pragma unroll 1
      for (int i = first; i < work.end - work.begin; i += STEP) {
        const int tile = work.begin + i, row = cache_row(work, tile);
        const bool is_settled = p.is_prefix_settled && (tile + 1) * Shape::kKeys <= work.prefix();
        if (!is_settled && !is_awaited) {
          await_previous();
          is_awaited = true;
        }
        load(row, i);
        if constexpr (Shape::kRows == 64) {
          if (p.num_lanes > 1 && tile + 2 < work.end) bring_ahead(cache_row(work, tile + 2));
        }
      }
    }
    if (!is_awaited) await_previous();
  }

  __device__ __forceinline__ uint64_t hint() const { return p.num_lanes == 1 ? kReadOnce : kReadNormally; }

  // One thread. Tells the warpgroups that multiply what there is to do.
  __device__ __forceinline__ void load_queries(Walk walk) const {
    await_previous();
    uint32_t parity = 0;
    LatentWork work;
#pragma unroll 1
    while (walk.advance(work)) {
      wait_barrier(memory.query_emptied(), parity ^ 1);
      memory.work(parity) = work;
      arrive_expecting(memory.query_filled(), MEMORY::kQueryBytes);
      const int row = work.start * p.num_heads + work.first_row;
#pragma unroll 1
      for (int slab = 0; slab < Shape::kSlabs; ++slab) {
        copy_box(memory.queries(slab), &maps.q, memory.query_filled(), kReadNormally, 64 * slab, row);
      }
      parity ^= 1;
    }
    wait_barrier(memory.query_emptied(), parity ^ 1);
    memory.work(parity).request = -1;
    arrive(memory.query_filled());
  }

  // One warp. The CTA with a unit's first part says where all of them lie: see LatentMerge.
  __device__ __forceinline__ void leave_plan(Walk walk) const {
    await_previous();
    LatentWork work;
#pragma unroll 1
    while (p.arrivals == nullptr && walk.advance(work)) {
      if (work.slot % 2 == 0) continue;
      const int num_rows = min(work.query_len * p.num_heads - work.first_row, Shape::kRows);
      int2* plan = reinterpret_cast<int2*>(p.plan) + static_cast<int64_t>(work.start) * p.num_heads + work.first_row;
#pragma unroll 1
      for (int row = threadIdx.x % 32; row < num_rows; row += 32) {
        plan[row] = make_int2(work.first_slot, work.num_parts * Shape::kRows + row);
      }
    }
    leave_padding();
  }

 private:
  // Zeros, or no parts, of which the merge makes zeros. Not inlined: the loops of the other warps would get fewer registers.
  __device__ __attribute__((noinline)) void leave_padding() const {
    const LatentLine<Shape::kRows, Shape::kKeys> line{p};
#pragma unroll 1
    for (int request = blockIdx.x; request < p.num_requests; request += p.num_shares * p.num_lanes) {
      if (!line.is_padding(request)) continue;
      const int64_t begin = int64_t{p.query_start_loc[request]} * p.num_heads;
      const int64_t end = int64_t{p.query_start_loc[request + 1]} * p.num_heads;
      if (p.arrivals == nullptr) {
        fill(reinterpret_cast<uint2*>(p.plan), begin, end);
      } else {
        constexpr int kRowWords = Shape::kValueDim / 4;
        fill(static_cast<uint2*>(p.out), begin * kRowWords, end * kRowWords);
      }
    }
  }

  static __device__ __forceinline__ void fill(uint2* to, int64_t begin, int64_t end) {
#pragma unroll 1
    for (int64_t i = begin + threadIdx.x % 32; i < end; i += 32) to[i] = make_uint2(0, 0);
  }

  // This lane's part of a tile goes to the L2 cache, or each round of the two places for tiles would wait for DRAM. One
  // lane alone is bound by the memory's rate, and took 8 % longer with it.
  __device__ __forceinline__ void bring_ahead(int row) const {
    if (row < 0 || row >= p.num_blocks << p.block_size_log2) return;
    const int lane = blockIdx.x % p.num_lanes;
    const int begin = Shape::kKeys * lane / p.num_lanes, end = Shape::kKeys * (lane + 1) / p.num_lanes;
    prefetch_bulk(static_cast<const char*>(p.latent_cache) + (int64_t{row} + begin) * Shape::kRowBytes,
                   (end - begin) * Shape::kRowBytes);
  }

  // The tile's first row in the cache; negative, so that all of the box lies outside, if it has no block.
  __device__ __forceinline__ int cache_row(const LatentWork& work, int tile) const {
    const int token = tile * Shape::kKeys;
    if (token >= work.seq_len) return -Shape::kKeys;
    const int block = p.block_tables[work.request * p.table_stride + (token >> p.block_size_log2)];
    return block < 0 ? -Shape::kKeys : (block << p.block_size_log2) + (token & ((1 << p.block_size_log2) - 1));
  }
};

// The keys of 64 rows of queries: one thread streams the even tiles of a unit, one the odd ones, in the order in which slabs
// are given back: the rotated one, the columns of the warpgroup that has the tile, those of the other.
struct WideLoader : LatentLoader<LatentMemory> {
  // One thread. TILE: 0 for even tiles, 1 for odd ones.
  template <int TILE>
  __device__ __forceinline__ void load_keys(Walk walk) const {
    uint32_t parity = 0;
    for_tiles<2>(walk, TILE, [&](int row, int) {
      load_rope<TILE>(row, parity);
      if constexpr (Shape::kIsFp8) {
        load_raw<TILE>(row, parity);
      } else {
        load_columns<TILE, TILE>(row, parity);
        load_columns<TILE, 1 - TILE>(row, parity);
      }
      parity ^= 1;
    });
  }

 private:
  template <int TILE>
  __device__ __forceinline__ void load_rope(int row, uint32_t parity) const {
    constexpr int kColumn = Shape::kIsFp8 ? 0 : Shape::kValueDim;   // of its map
    wait_barrier(memory.emptied(TILE, 2), parity ^ 1);
    arrive_expecting(memory.rope_filled(TILE), Shape::kSlabBytes);
    copy_box(memory.keys(TILE, Shape::kValueSlabs), &maps.rope, memory.rope_filled(TILE), hint(), kColumn, row);
  }

  // Of warpgroup W's outputs.
  template <int TILE, int W>
  __device__ __forceinline__ void load_columns(int row, uint32_t parity) const {
    wait_barrier(memory.emptied(TILE, W), parity ^ 1);
#pragma unroll
    for (int pair = 2 * W; pair < 2 * W + 2; ++pair) {
      arrive_expecting(memory.filled(TILE, pair), 2 * Shape::kSlabBytes);
      copy_box(memory.keys(TILE, 2 * pair), &maps.cache, memory.filled(TILE, pair), hint(), 0, row, 2 * pair);
    }
  }

  // What is converted to the slabs of latents: it lies where both warpgroups' columns were.
  template <int TILE>
  __device__ __forceinline__ void load_raw(int row, uint32_t parity) const {
    wait_barrier(memory.emptied(TILE, TILE), parity ^ 1);
    wait_barrier(memory.emptied(TILE, 1 - TILE), parity ^ 1);
    arrive_expecting(memory.raw_filled(TILE), Shape::kRawBytes);
    copy_box(memory.raw_scales(TILE), &maps.scales, memory.raw_filled(TILE), hint(), 0, row);
#pragma unroll 1
    for (int part = 0; part < Shape::kScales; ++part) {
      copy_box(memory.raw(TILE, part), &maps.cache, memory.raw_filled(TILE), hint(), Shape::kScaleColumns * part, row);
    }
  }
};

}  // namespace slipstream
