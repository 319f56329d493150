//! Every preset and the embedded default read without an error, and say how they are used.

use std::path::Path;
use tokenrouter_config::{LaunchFile, Source};

#[test]
fn every_preset_reads() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let presets = folder.join("presets");
    let mut seen = 0;
    for entry in std::fs::read_dir(&presets).expect("config/presets") {
        let path = entry.expect("an entry").path();
        let file = LaunchFile::load(&path).unwrap_or_else(|error| panic!("{error}"));
        let text = std::fs::read_to_string(&path).expect("it was read before");
        assert!(text.starts_with('#') && text.contains("tokenrouter serve --config"), "{}: no head", path.display());
        assert_eq!(file.router.models.len(), file.models.len());
        seen += 1;
    }
    assert!(seen >= 4, "{seen} presets");
}

#[test]
fn the_embedded_default_is_the_demo_pair() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo");
    let file = LaunchFile::load(&demo.join("launch.toml")).unwrap_or_else(|error| panic!("{error}"));
    let preset = LaunchFile::load(&demo.join("../presets/demo-pair.toml")).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((&file.router.algorithm, &file.router.params), (&preset.router.algorithm, &preset.router.params));
    assert_eq!(file.router.models, ["small", "large"]);
    assert_eq!(file.models[0].path, Source::Local(demo.join("small")));
    assert_eq!(file.models[1].path, Source::Local(demo.join("large")));
}
