// Numbers that are written as text in config.pbtxt, by the grammar of core/numerals.py: nothing may follow them.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace slipstream {

// Nothing for what is no number of this type, or none that it can hold.  Knows no locale, unlike strtod.
template <typename Number>
std::optional<Number> read_number(std::string_view text) {
  constexpr std::string_view kSpace = " \t\n\r\v\f", kDigits = "0123456789";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return std::nullopt;
  text = text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
  const std::string_view unsigned_text = text.substr(text[0] == '+' || text[0] == '-');
  if (unsigned_text.empty()) return std::nullopt;
  if (unsigned_text[0] != '.' && kDigits.find(unsigned_text[0]) == std::string_view::npos) return std::nullopt;
  const std::string_view read = text[0] == '+' ? unsigned_text : text;  // from_chars takes no plus
  Number number{};
  const auto [end, error] = std::from_chars(read.data(), read.data() + read.size(), number);
  if (error != std::errc() || end != read.data() + read.size()) return std::nullopt;
  return number;
}

}  // namespace slipstream
