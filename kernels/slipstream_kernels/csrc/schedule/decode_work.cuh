// Who computes what: the keys of all (request, kv head, tile of rows) units, in tiles of 16 tokens, form one line that
// the CTAs cut into equal contiguous shares. Read from seq_lens on the device, so any mix of lengths is balanced and
// nothing is decided on the host but the size of the grid. Each unit counts UNIT_COST tiles more than it has: the time
// that beginning and ending it takes, without which a CTA that draws many short requests would be late.
//
// Padding of a CUDA graph (no tokens) has no unit: all of it lies side by side, and the CTA that drew it was last by far.
// What it gets instead: clear_padding in the kernel.
#pragma once

#include "params/decode_params.h"
#include "schedule/request_sums.cuh"

namespace slipstream {

constexpr int kTileTokens = 16;
constexpr int kMaxRequests = 1024;

struct RequestWork {
  int start;        // first row of q
  int query_len;
  int seq_len;
  int first_tile;   // tiles before this one are outside every row's window
  int num_tiles;
  int num_row_tiles;   // none of padding
};

template <int ROWS>
__device__ __forceinline__ RequestWork request_work(const DecodeParams& p, int request) {
  RequestWork work;
  work.start = p.query_start_loc[request];
  work.query_len = p.query_start_loc[request + 1] - work.start;
  work.seq_len = p.seq_lens[request];
  const int lowest = p.sliding_window > 0 ? max(0, work.seq_len - work.query_len - p.sliding_window + 1) : 0;
  work.first_tile = lowest / kTileTokens;
  work.num_tiles = (work.seq_len + kTileTokens - 1) / kTileTokens - work.first_tile;
  work.num_row_tiles = work.seq_len > 0 ? (work.query_len * p.group + ROWS - 1) / ROWS : 0;
  return work;
}

// Fills ends[request] with the number of tiles of requests 0..request. All threads of the CTA; ends with a barrier.
template <int ROWS, int UNIT_COST, int THREADS>
__device__ __forceinline__ void count_tiles(const DecodeParams& p, int* ends) {
  __shared__ int warp_sums[THREADS / 32];
  sum_over_requests<THREADS>(p.num_requests, ends, warp_sums, [&p](int request) {
    const RequestWork work = request_work<ROWS>(p, request);
    return (work.num_tiles + UNIT_COST) * work.num_row_tiles * p.num_kv_heads;
  });
}

// The part of one unit that lies in a CTA's share.
struct Segment {
  RequestWork work;
  int request, kv_head, row_tile;
  int begin, end;   // tiles of the unit
  int unit_start;   // where the unit's first tile lies on the line
};

// A walk over a share of the line, segment by segment.
template <int ROWS, int UNIT_COST>
struct ShareWalk {
  int next, stop, request;

  __device__ __forceinline__ bool advance(const DecodeParams& p, const int* ends, Segment& segment) {
    do {
      if (next >= stop) return false;
      while (ends[request] <= next) ++request;
      const int offset = next - (request == 0 ? 0 : ends[request - 1]);
      segment.request = request;
      segment.work = request_work<ROWS>(p, request);
      const int length = segment.work.num_tiles + UNIT_COST;
      const int unit = offset / length, from = offset - unit * length, to = min(length, from + stop - next);
      segment.begin = max(0, from - UNIT_COST);
      segment.end = to - UNIT_COST;
      segment.unit_start = next - from + UNIT_COST;
      segment.kv_head = unit / segment.work.num_row_tiles;
      segment.row_tile = unit - segment.kv_head * segment.work.num_row_tiles;
      next += to - from;
    } while (segment.end <= segment.begin);  // a share that ends within the cost of a unit has none of its tiles
    return true;
  }
};

template <typename WALK>
__device__ __forceinline__ WALK share_of(int cta, int share, int total, const int* ends, int num_requests) {
  WALK walk;
  walk.next = min(cta * share, total);
  walk.stop = min(walk.next + share, total);
  walk.request = find_request(ends, num_requests, walk.next);
  return walk;
}

}  // namespace slipstream
