// Read numbers as the backend does. stdin: cases in hexadecimal, one a line, after `long` or `double`. Prints each
// number, or "error".
#include <cstdio>
#include <iostream>

#include "numerals.h"

int main() {
  for (std::string type, digits; std::cin >> type >> digits;) {
    std::string text;
    for (size_t i = 0; digits != "-" && i + 1 < digits.size(); i += 2) {
      text += static_cast<char>(std::stoul(digits.substr(i, 2), nullptr, 16));
    }
    if (type == "long") {
      const auto number = slipstream::read_number<long>(text);
      number ? std::printf("%ld\n", *number) : std::printf("error\n");
    } else {
      const auto number = slipstream::read_number<double>(text);
      number ? std::printf("%a\n", *number) : std::printf("error\n");
    }
  }
}
