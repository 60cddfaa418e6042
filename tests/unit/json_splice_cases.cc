// Run json_splice.cc over cases from stdin: "set OBJECT KEY VALUE", "get OBJECT KEY _", ... each argument in
// hexadecimal. Prints the result in hexadecimal, "none", or "error"; test_json_splice.py compares with Python's json.
#include <cstdio>
#include <iostream>

#include "json_splice.h"

static std::string from_hex(const std::string& digits) {
  std::string bytes;
  for (size_t i = 0; i + 1 < digits.size(); i += 2) {
    bytes += static_cast<char>(std::stoul(digits.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

static void print_hex(std::string_view bytes) {
  for (const char byte : bytes) std::printf("%02x", static_cast<unsigned char>(byte));
  std::printf("\n");
}

int main() {
  for (std::string operation, object, key, value; std::cin >> operation >> object >> key >> value;) {
    try {
      object = from_hex(object);  // results point into it
      if (operation == "set") {
        print_hex(slipstream::json_with_member(object, from_hex(key), from_hex(value)));
      } else if (operation == "elements") {
        std::string joined;
        for (const auto element : slipstream::json_elements(object)) joined += std::string(element) + "\n";
        print_hex(joined);
      } else if (operation == "sorted") {
        print_hex(slipstream::json_sorted(object));
      } else if (operation == "string") {
        print_hex(slipstream::json_string(object));
      } else if (operation == "quoted") {
        print_hex(slipstream::json_quoted(object));
      } else if (const auto found = slipstream::json_member(object, from_hex(key))) {
        print_hex(*found);
      } else {
        std::printf("none\n");
      }
    } catch (const std::exception&) {
      std::printf("error\n");
    }
  }
}
