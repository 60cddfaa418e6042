// The options of the server, by the command line of this process: the C API does not tell them.  In a process that has the
// server as a library all of them count as not given.
#pragma once

#include <optional>
#include <string>

namespace slipstream {

// Its arguments, each with a zero byte behind it.
std::string read_command_line();

// The value of the last `--name=value` or `--name value`.
std::optional<std::string> option_of(const std::string& command_line, const std::string& name);

// The file in a model's folder that Triton reads: config.pbtxt, unless --model-config-name names another that is there.
std::string config_path(const std::string& model_dir, const std::string& model_config_name);

}  // namespace slipstream
