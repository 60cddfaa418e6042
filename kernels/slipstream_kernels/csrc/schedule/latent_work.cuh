// Who attends what: the tiles of 64 keys of all requests form one line, in which each unit (64 rows of a request, or as
// many times 64 as there are lanes) has its own. The line is cut into equal shares, read from the lengths on the device.
// The CTAs of a share, one per lane, walk over the same keys at the same time, so that the L2 cache serves all but one:
// 128 heads are two times 64 rows.
//
// A unit counts unit_cost tiles more than it has: the time that beginning and ending it takes. Padding of a CUDA graph (no
// tokens) has no unit: all of it lies side by side, and the CTA that drew it was last by far.
//
// Where all units are equal, a share is some whole ones or an even part of one, if it is hardly longer for that: each cut
// elsewhere costs another beginning and end, and adding up the parts.
#pragma once

#include "params/latent_params.h"
#include "schedule/request_sums.cuh"

namespace slipstream {

// The part of one unit that lies in a CTA's share.
struct LatentWork {
  int request;       // negative: nothing is left
  int start;         // of the request's tokens in q
  int query_len;
  int seq_len;
  int first_row;     // of the lane's rows: (token, head) pairs of the request
  int begin, end;    // tiles of keys
  int num_parts;     // shares that have tiles of the unit; 1: the output is complete
  int slot;          // where the CTA leaves its part; odd if it is the unit's first
  int first_slot;    // of the unit's parts

  __device__ __forceinline__ int prefix() const { return seq_len - query_len; }
};

template <int ROWS, int KEYS>
struct LatentLine {
  const LatentParams& p;

  __device__ __forceinline__ int query_len(int request) const {
    return p.query_start_loc[request + 1] - p.query_start_loc[request];
  }
  __device__ __forceinline__ bool is_padding(int request) const { return p.seq_lens[request] == 0; }
  __device__ __forceinline__ int num_tiles(int request) const { return (p.seq_lens[request] + KEYS - 1) / KEYS; }
  __device__ __forceinline__ int num_units(int request) const {
    const int rows = ROWS * p.num_lanes;
    return is_padding(request) ? 0 : (query_len(request) * p.num_heads + rows - 1) / rows;
  }
  __device__ __forceinline__ int cost(int request) const {
    return (num_tiles(request) + p.unit_cost) * num_units(request);
  }
};

// A walk over a share of the line, unit by unit.
template <int ROWS, int KEYS>
struct LatentWalk {
  const LatentParams& p;
  int cta, lane, share;         // this CTA and its lane; the length of a share
  int parts = 1;                // more: as many shares have a unit, in even parts
  int next, stop;
  int request, request_begin;   // where the request begins on the line
  int length, num_units;        // of a unit of this request; of the request

  // ends: of LatentLine's costs, read no more afterwards.  are_equal: whether all units have as many tiles as the first.
  __device__ __forceinline__ LatentWalk(const LatentParams& params, const int* ends, bool are_equal, int cta_index)
      : p(params), cta(cta_index) {
    const int total = ends[p.num_requests - 1];
    lane = cta % p.num_lanes;
    share = max((total + p.num_shares - 1) / p.num_shares, p.min_share);
    if (are_equal && total > 0) even_out(total);
    next = min(cta / p.num_lanes / parts * share, total);
    stop = min(next + share, total);
    if (parts > 1 && next < total) take_part(cta / p.num_lanes % parts);
    request = find_request(ends, p.num_requests, next);
    request_begin = request == 0 ? 0 : ends[request - 1];
    measure();
  }

  // False if no unit is left.
  __device__ __forceinline__ bool advance(LatentWork& work) {
    int unit_start;
    do {
      if (next >= stop) return false;
      while (request_begin + length * num_units <= next) {
        request_begin += length * num_units;
        ++request;
        measure();
      }
      const int offset = next - request_begin, unit = offset / length, from = offset - unit * length;
      const int to = min(length, from + stop - next);
      work.begin = max(0, from - p.unit_cost);
      work.end = to - p.unit_cost;
      work.first_row = (unit * p.num_lanes + lane) * ROWS;
      work.start = p.query_start_loc[request];
      work.query_len = p.query_start_loc[request + 1] - work.start;
      unit_start = next - from + p.unit_cost;
      next += to - from;
      // A share that ends within the cost of a unit has none of its tiles, and the last lanes may have no rows.
    } while (work.end <= work.begin || work.first_row >= work.query_len * p.num_heads);
    work.request = request;
    work.seq_len = p.seq_lens[request];
    const int index = cta / p.num_lanes;
    const int first_share = parts > 1 ? index - index % parts : unit_start / share;
    work.num_parts = parts > 1 ? parts : (unit_start + length - p.unit_cost - 1) / share - first_share + 1;
    // A CTA has two parts at most: of the unit that came to it and of the one that it hands on.
    work.slot = 2 * cta + (index == first_share ? 1 : 0);
    work.first_slot = 2 * (first_share * p.num_lanes + lane) + 1;
    return true;
  }

 private:
  // Of equal units: whole ones for a share, or as many shares as there are for each.
  __device__ __forceinline__ void even_out(int total) {
    const int tiles = LatentLine<ROWS, KEYS>{p}.num_tiles(0), unit = tiles + p.unit_cost, count = total / unit;
    if (count > p.num_shares) {
      const int units = (share + unit - 1) / unit * unit;
      if (units <= share + p.slack) share = units;
      return;
    }
    const int most = min(p.num_shares / count, min((unit + p.min_share - 1) / p.min_share, tiles));
    if ((unit + most - 1) / most <= share + p.slack) parts = most, share = unit;
  }

  // Of the tiles of the unit that begins at `next`.
  __device__ __forceinline__ void take_part(int part) {
    const int tiles = share - p.unit_cost, first = next + p.unit_cost;
    next = first + part * tiles / parts, stop = first + (part + 1) * tiles / parts;
  }

  __device__ __forceinline__ void measure() {
    if (request >= p.num_requests) return;
    const LatentLine<ROWS, KEYS> line{p};
    length = line.num_tiles(request) + p.unit_cost;
    num_units = line.num_units(request);
  }
};

// This CTA's walk. All THREADS.  ends: shared, a number of each request; warp_sums: THREADS / 32 more.
template <int THREADS, int ROWS, int KEYS>
__device__ __forceinline__ LatentWalk<ROWS, KEYS> begin_walk(const LatentParams& p, int* ends, int* warp_sums) {
  const LatentLine<ROWS, KEYS> line{p};
  const int first_tiles = line.num_tiles(0);
  bool is_equal = true;   // what this thread has seen of the units
  sum_over_requests<THREADS>(p.num_requests, ends, warp_sums, [&](int request) {
    const int cost = line.cost(request);
    is_equal &= cost == 0 || line.num_tiles(request) == first_tiles;
    return cost;
  });
  return LatentWalk<ROWS, KEYS>(p, ends, __syncthreads_and(is_equal), blockIdx.x);
}

}  // namespace slipstream
