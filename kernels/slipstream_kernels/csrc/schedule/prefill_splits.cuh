// Into how many parts the keys of a launch's tiles are split. Integers only: tests run it on a CPU, too.
#pragma once

namespace slipstream {

constexpr int kMaxSplits = 8;
// Work items that split keys, at most, for each SM: their sums take this much room.
constexpr int kMaxSplitsPerSm = 2;

// An item is a tile of rows of a packed head. first_part: before those of the item, of all parts.
struct ItemSplit {
  int item;
  int split;
  int num_splits;
  int first_part;
};

// Items up to num_whole are computed by one CTA each, the others by num_splits.
struct SplitPlan {
  int num_whole;
  int num_splits;

  __device__ __forceinline__ int size(int num_items) const {
    return num_whole + (num_items - num_whole) * num_splits;
  }

  // Of a place in the order of work. Places at or past size() continue the items: they are not split.
  __device__ __forceinline__ ItemSplit at(int index, int num_items) const {
    if (index < num_whole) return {index, 0, 1, 0};
    const int rest = index - num_whole;
    if (rest >= (num_items - num_whole) * num_splits) return {index - size(num_items) + num_items, 0, 1, 0};
    const int place = rest / num_splits;
    return {num_whole + place, rest - place * num_splits, num_splits, place * num_splits};
  }
};

// Full waves of items are whole. The rest is split so that it takes the least time if all items take equally long; as
// little as possible for that.
__device__ __forceinline__ SplitPlan plan_splits(int num_items, int num_sms) {
  const int num_rest = num_items % num_sms;
  int best = 1, best_waves = num_rest > 0;
  for (int splits = 2; splits <= kMaxSplits && num_rest * splits <= kMaxSplitsPerSm * num_sms; ++splits) {
    const int waves = (num_rest * splits + num_sms - 1) / num_sms;
    if (waves * best < best_waves * splits) best = splits, best_waves = waves;
  }
  return {best == 1 ? num_items : num_items - num_rest, best};
}

}  // namespace slipstream
