// Cuts a list of chunks into runs as the CTAs of sm90_swap_ab_stream.cu do, and prints "bad: …" unless every chunk of
// every tile is in one run alone, whose number `owner` gives. Arguments: num_tiles num_chunks num_runs, several times.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "schedule/stream_runs.cuh"

static void check(const slipstream::StreamRuns& runs) {
  std::vector<int> seen(runs.total());
  unsigned least = runs.total(), most = 0;
  for (unsigned run = 0; run < runs.num_runs; ++run) {
    const int begin = runs.begin(run), end = runs.begin(run + 1);
    const unsigned length = end - begin;
    least = length < least ? length : least, most = length > most ? length : most;
    for (int position = begin; position < end;) {
      const slipstream::StreamSegment segment = runs.segment_at(position, end);
      if (segment.begin_chunk >= segment.end_chunk) return void(std::printf("bad: an empty segment at %d\n", position));
      for (int chunk = segment.begin_chunk; chunk < segment.end_chunk; ++chunk, ++position) {
        const int index = segment.tile * static_cast<int>(runs.num_chunks) + chunk;
        if (index != position || runs.owner(index) != static_cast<int>(run)) std::printf("bad: chunk %d\n", index);
        ++seen[index];
      }
    }
  }
  for (size_t i = 0; i < seen.size(); ++i) {
    if (seen[i] != 1) std::printf("bad: chunk %zu %d times\n", i, seen[i]);
  }
  if (least < 1 || most > least + 1) std::printf("bad: runs of %u to %u chunks\n", least, most);
}

int main(int count, char** values) {
  for (int i = 1; i + 2 < count; i += 3) {
    check({static_cast<uint32_t>(std::atoi(values[i])), static_cast<uint32_t>(std::atoi(values[i + 1])),
           static_cast<uint32_t>(std::atoi(values[i + 2]))});
    std::printf("checked\n");
  }
}
