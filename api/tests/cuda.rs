//! What a machine without a usable NVIDIA driver is told, by the real program; `tests/tests/cuda_serve.rs` has what needs one.
#![cfg(target_os = "linux")]

mod support;

use support::{Folder, program, root};

/// A folder in which the driver's libraries are no libraries: as good as none, on machines that have one too.
fn no_driver(folder: &Folder) -> String {
    for name in ["libcuda.so", "libcuda.so.1", "nvcuda.so", "nvcuda.so.1"] {
        folder.write(&format!("libraries/{name}"), "");
    }
    folder.path.join("libraries").display().to_string()
}

fn check(folder: &Folder, device: &str) -> (Option<i32>, String) {
    let path = root().join("config/demo/small");
    let text = format!("[[models]]\nname = \"small\"\npath = \"{}\"\ndevice = \"{device}\"\n", path.display());
    folder.write("launch.toml", &text);
    let mut command = program(folder, &["check", "--config", "launch.toml"]);
    command.current_dir(&folder.path).env("LD_LIBRARY_PATH", no_driver(folder));
    let output = command.output().expect("the program runs");
    (output.status.code(), String::from_utf8(output.stderr).expect("UTF-8"))
}

#[test]
fn a_machine_without_a_driver_is_told_so_in_one_line() {
    let folder = Folder::new();
    let expected = "error: launch.toml:4:10: model `small`: no NVIDIA driver was found (libcuda.so.1); install one, or set \
                    device = \"cpu\"\n";
    assert_eq!(check(&folder, "cuda:0"), (Some(2), expected.to_owned()));
    assert_eq!(check(&folder, "cpu").0, Some(0));
    let (code, unknown) = check(&folder, "gpu");
    assert!(code == Some(2) && unknown.contains("= \"gpu\" is unknown; write \"cpu\", or \"cuda:0\""), "{unknown}");
}
