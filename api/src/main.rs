//! The `tokenrouter` binary.

fn main() -> std::process::ExitCode {
    tokenrouter::cli::run(std::env::args_os())
}
