#include "command_line.h"

#include <unistd.h>

#include <fstream>
#include <iterator>

namespace slipstream {

std::string read_command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::optional<std::string> option_of(const std::string& command_line, const std::string& name) {
  const std::string option = "--" + name;
  std::optional<std::string> value;
  for (size_t at = command_line.find(option); at != std::string::npos; at = command_line.find(option, at + 1)) {
    const bool is_whole_word = at == 0 || command_line[at - 1] == '\0';
    const size_t end = at + option.size();
    if (!is_whole_word || end >= command_line.size() || (command_line[end] != '=' && command_line[end] != '\0')) continue;
    value = command_line.c_str() + end + 1;  // up to the next zero byte
  }
  return value;
}

std::string config_path(const std::string& model_dir, const std::string& model_config_name) {
  const std::string named = model_dir + "/configs/" + model_config_name + ".pbtxt";
  const bool is_there = !model_config_name.empty() && access(named.c_str(), F_OK) == 0;
  return is_there ? named : model_dir + "/config.pbtxt";
}

}  // namespace slipstream
