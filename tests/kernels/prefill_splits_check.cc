// Prints the plan of a launch of so many items on so many SMs, "whole splits", and "bad: …" unless its places in the
// order of work take each split of each item once and each part lies in a place of its own. Arguments: items SMs.

#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>

#define __device__
#define __forceinline__ inline
#include "schedule/prefill_splits.cuh"

using namespace slipstream;

int main(int, char** arguments) {
  const int num_items = std::atoi(arguments[1]), num_sms = std::atoi(arguments[2]), num_padding = 5;
  const SplitPlan plan = plan_splits(num_items, num_sms);
  std::printf("%d %d\n", plan.num_whole, plan.num_splits);
  std::set<std::pair<int, int>> taken;
  std::set<int> parts;
  for (int index = 0; index < plan.size(num_items) + num_padding; ++index) {
    const ItemSplit at = plan.at(index, num_items);
    const bool is_split = at.item >= plan.num_whole && at.item < num_items && plan.num_splits > 1;
    if (at.num_splits != (is_split ? plan.num_splits : 1)) std::printf("bad: splits of item %d\n", at.item);
    if (at.split < 0 || at.split >= at.num_splits) std::printf("bad: split %d\n", at.split);
    if (!taken.insert({at.item, at.split}).second) std::printf("bad: item %d is taken twice\n", at.item);
    if (!is_split) continue;
    const int part = at.first_part + at.split;
    if (!parts.insert(part).second || part >= kMaxSplitsPerSm * num_sms) std::printf("bad: part %d\n", part);
  }
  const int num_wanted = plan.num_whole + (num_items - plan.num_whole) * plan.num_splits + num_padding;
  if (static_cast<int>(taken.size()) != num_wanted) std::printf("bad: %zu places\n", taken.size());
  if (taken.rbegin()->first != num_items + num_padding - 1) std::printf("bad: padding\n");
}
