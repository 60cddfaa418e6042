// The rows and keys of a CTA: all tiles of queries of a launch in one order, handed out one by one.
//
// Order: sections of heads whose keys and values fit into the L2 cache together; in a section the last tiles, which see
// the most keys, first. A CTA asks for its next tile when it has loaded the one before, so uneven tiles balance. Several
// CTAs share the keys of each tile of a last wave that does not fill the GPU (prefill_splits.cuh). Tiles of padding
// requests, which attend to nothing, come last and do not count.
#pragma once

#include "params/prefill_params.h"
#include "schedule/prefill_splits.cuh"

namespace slipstream {

// One tile of queries of one packed head, and the tiles of keys that it sees, [begin_tile, end_tile).
struct Work {
  int start;       // of the request's tokens in q
  int query_len;
  int seq_len;
  int first_row;   // of the request's rows: (token, head of the pack)
  int head;        // packed head; negative: nothing is left
  int begin_tile;
  int end_tile;
  int request;
  int share;       // of the keys: first part, split and splits in one, for the loading warp has few registers

  // Where the parts of this tile's splits begin, in PrefillParams::parts.
  __device__ __forceinline__ int first_part() const { return share >> 8; }
  __device__ __forceinline__ int split() const { return share >> 4 & 15; }
  __device__ __forceinline__ int num_splits() const { return share & 15; }
};

constexpr int kMinTilesOfSplitLog2 = 3;
static_assert(kMaxSplits < 16);

template <int ROWS, int KEYS>
struct WorkList {
  const PrefillParams& p;
  int num_packed_heads;
  int num_row_tiles;     // before those of padding requests; at most: a request may end within a tile
  int size;
  SplitPlan plan;

  // The whole warp.
  __device__ __forceinline__ explicit WorkList(const PrefillParams& params) : p(params) {
    const int num_all = (p.num_tokens << p.pack_log2) / ROWS + p.num_requests;
    num_packed_heads = p.num_q_heads >> p.pack_log2;
    num_row_tiles = p.parts == nullptr ? num_all : count_row_tiles();
    const int num_items = num_row_tiles * num_packed_heads;
    plan = p.parts == nullptr ? SplitPlan{num_items, 1} : plan_splits(num_items, p.num_sms);
    size = plan.size(num_items) + (num_all - num_row_tiles) * num_packed_heads;
  }

  // The whole warp: the index after those that other CTAs took.
  __device__ __forceinline__ int take() const {
    int index = 0;
    if (threadIdx.x % 32 == 0) index = gridDim.x + atomicAdd(p.counters, 1);
    return __shfl_sync(~0u, index, 0);
  }

  // Once per CTA, after its last take(): the last one leaves the counters as it found them.
  __device__ __forceinline__ void leave() const {
    if (threadIdx.x % 32 == 0 && atomicInc(reinterpret_cast<unsigned*>(p.counters + 1), gridDim.x - 1) == gridDim.x - 1)
      p.counters[0] = 0;
  }

  // The whole warp: fills `work`; false if there are no rows at this index.
  __device__ __forceinline__ bool find(int index, Work& work) const {
    const ItemSplit at = plan.at(index, num_row_tiles * num_packed_heads);
    const int tile = find_tile(at.item, work);
    work.request = find_request(tile);
    work.start = p.query_start_loc[work.request];
    work.query_len = p.query_start_loc[work.request + 1] - work.start;
    work.first_row = (tile - first_tile(work.start, work.request)) * ROWS;
    if (work.first_row >= work.query_len << p.pack_log2) return false;
    work.seq_len = p.seq_lens[work.request];
    const int first_position = work.seq_len - work.query_len;
    const int last_row = min(work.first_row + ROWS, work.query_len << p.pack_log2) - 1;
    const int end = max(min(work.seq_len, first_position + (last_row >> p.pack_log2) + 1), 0);
    const int first = first_position + (work.first_row >> p.pack_log2) - p.sliding_window + 1;
    work.end_tile = (end + KEYS - 1) / KEYS;
    work.begin_tile = p.sliding_window > 0 ? min(max(first, 0) / KEYS, work.end_tile) : 0;
    return take_share(at, work);
  }

 private:
  // Tile of rows of an item; sets its head.
  __device__ __forceinline__ int find_tile(int item, Work& work) const {
    const int num_items = num_row_tiles * num_packed_heads;
    if (item >= num_items) {
      work.head = (item - num_items) % num_packed_heads;
      return num_row_tiles + (item - num_items) / num_packed_heads;
    }
    const int section = item / (num_row_tiles * p.heads_per_section);
    const int first_head = section * p.heads_per_section;
    const int num_heads = min(p.heads_per_section, num_packed_heads - first_head);
    const int rest = item - first_head * num_row_tiles;
    work.head = first_head + rest % num_heads;
    return num_row_tiles - 1 - rest / num_heads;
  }

  // Narrows the tiles of keys to those of the split; false if there are too few for it.
  __device__ __forceinline__ bool take_share(const ItemSplit& at, Work& work) const {
    const int begin = work.begin_tile, count = work.end_tile - begin;
    const int num_splits = min(at.num_splits, max(count >> kMinTilesOfSplitLog2, 1));
    const int share = (count + num_splits - 1) / num_splits;
    work.begin_tile = min(begin + share * at.split, work.end_tile);
    work.end_tile = min(work.begin_tile + share, work.end_tile);
    work.share = at.first_part << 8 | at.split << 4 | num_splits;
    return at.split < num_splits;
  }

  // Tiles up to the last request that has keys. CUDA graphs have a capacity of requests and tokens beyond the step's.
  __device__ __forceinline__ int count_row_tiles() const {
    for (int end = p.num_requests; end > 0; end -= 32) {
      const int request = end - 32 + static_cast<int>(threadIdx.x % 32);
      const unsigned found = __ballot_sync(~0u, request >= 0 && p.seq_lens[max(request, 0)] > 0);
      if (found == 0) continue;
      const int last = end - 1 - __clz(found);
      const int start = p.query_start_loc[last];
      return first_tile(start, last) + (((p.query_start_loc[last + 1] - start) << p.pack_log2) + ROWS - 1) / ROWS;
    }
    return 0;
  }

  // Tiles of a request are numbered from here: no two requests share a number.
  __device__ __forceinline__ int first_tile(int start, int request) const {
    return (start << p.pack_log2) / ROWS + request;
  }

  // The last request whose first tile is at or before `tile`: a search in which each lane looks at one of 32 places.
  __device__ __forceinline__ int find_request(int tile) const {
    const int lane = threadIdx.x % 32;
    int low = 0, high = p.num_requests;
    while (high - low > 1) {
      const int step = (high - low + 31) / 32, place = low + lane * step;
      const bool is_at_or_after = place < high && first_tile(p.query_start_loc[place], place) <= tile;
      low += (__popc(__ballot_sync(~0u, is_at_or_after)) - 1) * step;
      high = min(high, low + step);
    }
    return low;
  }
};

}  // namespace slipstream
