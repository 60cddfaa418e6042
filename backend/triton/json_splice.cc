#include "json_splice.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>

namespace slipstream {
namespace {

[[noreturn]] void fail(const char* expected) {
  throw std::runtime_error(std::string("malformed JSON: expected ") + expected);
}

size_t skip_space(std::string_view text, size_t at) {
  while (at < text.size() && (text[at] == ' ' || text[at] == '\t' || text[at] == '\n' || text[at] == '\r')) ++at;
  return at;
}

// One past the closing quote of the string that opens at `at`.
size_t skip_string(std::string_view text, size_t at) {
  for (++at; at < text.size(); ++at) {
    if (text[at] == '\\') {
      ++at;
    } else if (text[at] == '"') {
      return at + 1;
    }
  }
  fail("the end of a string");
}

// One past the value that begins at `at`: a string, a bracketed value, or a bare word or number.
size_t skip_value(std::string_view text, size_t at) {
  if (at >= text.size()) fail("a value");
  if (text[at] == '"') return skip_string(text, at);
  if (text[at] != '{' && text[at] != '[') {
    const size_t end = text.find_first_of(",]} \t\r\n", at);
    if (end == at) fail("a value");
    return end == std::string_view::npos ? text.size() : end;
  }
  int depth = 0;
  while (at < text.size()) {
    const char c = text[at];
    if (c == '"') {
      at = skip_string(text, at);
      continue;
    }
    ++at;
    if (c == '{' || c == '[') ++depth;
    if ((c == '}' || c == ']') && --depth == 0) return at;
  }
  fail("a closing bracket");
}

struct Members {
  size_t value_begin = std::string_view::npos;  // of the member looked for
  size_t value_end = 0;
  size_t close = 0;  // position of the object's '}'
  bool any = false;
};

// Calls visit(name, begin, end of the value) for each member.  Returns the position of the object's '}'.
template <typename Visit>
size_t scan_members(std::string_view text, Visit visit) {
  size_t at = skip_space(text, 0);
  if (at >= text.size() || text[at] != '{') fail("'{'");
  at = skip_space(text, at + 1);
  while (at < text.size() && text[at] != '}') {
    if (text[at] != '"') fail("a member name");
    const size_t name_end = skip_string(text, at);
    const std::string_view name = text.substr(at + 1, name_end - at - 2);
    at = skip_space(text, name_end);
    if (at >= text.size() || text[at] != ':') fail("':'");
    const size_t begin = skip_space(text, at + 1);
    const size_t end = skip_value(text, begin);
    visit(name, begin, end);
    at = skip_space(text, end);
    if (at < text.size() && text[at] == ',') at = skip_space(text, at + 1);
  }
  if (at >= text.size()) fail("'}'");
  return at;
}

Members scan(std::string_view text, std::string_view key) {
  Members found;
  found.close = scan_members(text, [&](std::string_view name, size_t begin, size_t end) {
    found.any = true;
    if (name != key) return;
    found.value_begin = begin;
    found.value_end = end;
  });
  return found;
}

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xC0 | (code >> 6));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    out += static_cast<char>(0xE0 | (code >> 12));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | (code >> 18));
    out += static_cast<char>(0x80 | ((code >> 12) & 0x3F));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  }
}

uint32_t hex4(std::string_view text, size_t at) {
  static const std::string_view kDigits = "0123456789abcdef";
  if (at + 4 > text.size()) fail("four hex digits");
  uint32_t value = 0;
  for (const char c : text.substr(at, 4)) {
    const size_t digit = kDigits.find(c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c);
    if (digit == std::string_view::npos) fail("four hex digits");
    value = value << 4 | static_cast<uint32_t>(digit);
  }
  return value;
}

}  // namespace

std::optional<std::string_view> json_member(std::string_view object, std::string_view key) {
  const Members found = scan(object, key);
  if (found.value_begin == std::string_view::npos) return std::nullopt;
  return object.substr(found.value_begin, found.value_end - found.value_begin);
}

std::optional<std::string_view> json_path(std::string_view object, std::initializer_list<std::string_view> keys) {
  std::optional<std::string_view> value = object;
  for (const std::string_view key : keys) {
    value = json_member(*value, key);
    if (!value) return std::nullopt;
  }
  return value;
}

std::vector<std::string_view> json_elements(std::string_view raw) {
  std::vector<std::string_view> elements;
  size_t at = skip_space(raw, 0);
  if (at >= raw.size() || raw[at] != '[') fail("'['");
  at = skip_space(raw, at + 1);
  while (at < raw.size() && raw[at] != ']') {
    const size_t end = skip_value(raw, at);
    elements.push_back(raw.substr(at, end - at));
    at = skip_space(raw, end);
    if (at < raw.size() && raw[at] == ',') at = skip_space(raw, at + 1);
  }
  if (at >= raw.size()) fail("']'");
  return elements;
}

std::string json_sorted(std::string_view raw) {
  std::vector<std::string> parts;
  if (raw.substr(0, 1) == "[") {
    for (const std::string_view element : json_elements(raw)) parts.push_back(json_sorted(element));
  } else if (raw.substr(0, 1) == "{") {
    scan_members(raw, [&](std::string_view name, size_t begin, size_t end) {
      parts.push_back("\"" + std::string(name) + "\":" + json_sorted(raw.substr(begin, end - begin)));
    });
    std::sort(parts.begin(), parts.end());
  } else {
    return std::string(raw);
  }
  std::string joined(1, raw.front());
  for (const std::string& part : parts) joined += joined.size() == 1 ? part : "," + part;
  return joined + (raw.front() == '[' ? ']' : '}');
}

std::string json_with_member(std::string_view object, std::string_view key, std::string_view value) {
  const Members found = scan(object, key);
  std::string result(object);
  if (found.value_begin != std::string_view::npos) {
    return result.replace(found.value_begin, found.value_end - found.value_begin, value);
  }
  const std::string member = "\"" + std::string(key) + "\":" + std::string(value);
  return result.insert(found.close, found.any ? "," + member : member);
}

bool json_is_empty(std::string_view raw) {
  const size_t inside = skip_space(raw, 1);
  return raw.size() >= 2 && (raw[0] == '[' || raw[0] == '{') && inside == raw.size() - 1;
}

std::string json_string(std::string_view raw) {
  if (raw.size() < 2 || raw.front() != '"' || raw.back() != '"') fail("a string");
  std::string out;
  for (size_t at = 1; at + 1 < raw.size(); ++at) {
    if (raw[at] != '\\') {
      out += raw[at];
      continue;
    }
    const char escape = raw[++at];
    static const std::string_view kFrom = "nrtbf", kTo = "\n\r\t\b\f";
    const size_t plain = kFrom.find(escape);
    if (plain != std::string_view::npos) {
      out += kTo[plain];
    } else if (escape == 'u') {
      uint32_t code = hex4(raw, at + 1);
      at += 4;
      if (code >= 0xD800 && code < 0xDC00 && raw.substr(at + 1, 2) == "\\u") {
        const uint32_t low = hex4(raw, at + 3);
        if (low < 0xDC00 || low > 0xDFFF) fail("the second half of a surrogate pair");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        at += 6;
      }
      append_utf8(out, code);
    } else {
      out += escape;  // \" \\ and \/
    }
  }
  return out;
}

std::string json_quoted(std::string_view text) {
  std::string out = "\"";
  for (const char byte : text) {
    const auto code = static_cast<unsigned char>(byte);
    if (code >= 0x20 && byte != '"' && byte != '\\') {
      out += byte;
      continue;
    }
    char escaped[7];
    snprintf(escaped, sizeof escaped, "\\u%04x", unsigned{code});
    out += escaped;
  }
  return out + '"';
}

}  // namespace slipstream
