// Read and replace members of a JSON object held as text, leaving everything else byte for byte as it was.
//
// Enough for Triton's model config and contract.json: no JSON library, no tree.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace slipstream {

// The raw text of a member's value ("[1, 2]", "\"x\"", "{...}"), or nullopt.  `object` must begin with '{' (after
// white space).  Throws std::runtime_error when the text is not JSON as far as it was read.
std::optional<std::string_view> json_member(std::string_view object, std::string_view key);

// The same, walking down nested objects; nullopt when any step is missing.
std::optional<std::string_view> json_path(std::string_view object, std::initializer_list<std::string_view> keys);

// The raw elements of a list.  Throws std::runtime_error when raw is no list.
std::vector<std::string_view> json_elements(std::string_view raw);

// A value that begins at once, without white space between its parts and with the members of each object in one order:
// equal for equal configs, of which the server writes some members in any order.
std::string json_sorted(std::string_view raw);

// `object` with the member set to the raw JSON `value`, replaced in place or appended.
std::string json_with_member(std::string_view object, std::string_view key, std::string_view value);

// Whether raw is an empty list or object.
bool json_is_empty(std::string_view raw);

// The text of a raw JSON string, escapes resolved.  Throws std::runtime_error when raw is no string.
std::string json_string(std::string_view raw);

// The raw JSON string of a text.
std::string json_quoted(std::string_view text);

}  // namespace slipstream
