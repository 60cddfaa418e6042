// libFuzzer: any text as the JSON of a model's config: read, replaced and read again, or refused with runtime_error.
#include <cstdlib>
#include <stdexcept>

#include "json_splice.h"

using namespace slipstream;

namespace {

void read_everything(std::string_view text) {
  if (const auto value = json_member(text, "parameters")) json_is_empty(*value);
  if (const auto value = json_path(text, {"parameters", "task", "string_value"})) json_string(*value);
  if (const auto groups = json_member(text, "instance_group")) {
    for (const std::string_view group : json_elements(*groups)) json_member(group, "count");
  }
}

void replace_and_read(std::string_view text) {
  const std::string changed = json_with_member(text, "input", "[{\"name\":\"x\"}]");
  const auto found = json_member(changed, "input");
  if (!found || *found != "[{\"name\":\"x\"}]") std::abort();
  if (json_with_member(changed, "input", *found) != changed) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(bytes), size);
  for (const auto use : {read_everything, replace_and_read}) {
    try {
      use(text);
    } catch (const std::runtime_error&) {
    }
  }
  try {
    json_string(text);
    json_elements(text);
    json_sorted(text);
  } catch (const std::runtime_error&) {
  }
  json_is_empty(text);
  return 0;
}
