//! Images of each format, compared with how transformers reads them (tests/fixtures/make_images.py), and damaged ones.

use inflight_images::{ImageError, ImageLimits, Pixels, decode};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::fixtures::{bytes_of, hex, images, read};

/// A line of decoded.json.
#[derive(Deserialize)]
struct Case {
    file: String,
    size: (usize, usize),
    sha256: String,
    values: Vec<(usize, u8)>,
}

#[test]
fn files_have_the_values_that_transformers_reads() {
    let cases: Vec<Case> = read("decoded.json");
    assert!(cases.len() > 40, "{}", cases.len());
    for case in cases {
        let image = decode(&bytes_of(&case.file), &ImageLimits::default());
        let image = image.unwrap_or_else(|error| panic!("{}: {error}", case.file));
        assert_eq!((image.height(), image.width()), case.size, "{}", case.file);
        for &(place, value) in &case.values {
            assert_eq!(image.values()[place], value, "{} at {place}", case.file);
        }
        let hash = hex(&Sha256::digest(image.values()));
        assert_eq!(hash, case.sha256, "{}", case.file);
    }
}

#[test]
fn a_file_that_ends_early_is_refused_or_has_its_size() {
    for (name, data) in images() {
        let whole = decode(&data, &ImageLimits::default()).expect("the whole file is read");
        let size = |image: &Pixels| (image.height() * image.width(), image.values().len());
        // Within the headers, and at some places behind.
        for end in (0..data.len()).filter(|end| *end < 512 || end % 7 == 0) {
            match decode(&data[..end], &ImageLimits::default()) {
                Ok(image) => assert_eq!(size(&image), size(&whole), "{name} until {end}"),
                Err(ImageError::Data { .. } | ImageError::Format { .. }) => {}
                Err(error) => panic!("{name} until {end}: {error}"),
            }
        }
        // The first frame of an animation may end before that.
        let half = decode(&data[..data.len() / 2], &ImageLimits::default());
        assert!(
            half.is_err() || name.starts_with("animated"),
            "half of {name} is read"
        );
    }
}

#[test]
fn a_changed_byte_changes_values_or_is_refused() {
    for (name, mut data) in images() {
        let limits = ImageLimits {
            max_image_pixels: 1 << 14,
            ..ImageLimits::default()
        };
        // All of the headers, and some places behind.
        let places = (0..data.len()).filter(|place| *place < 256 || place % 29 == 0);
        for place in places.collect::<Vec<_>>() {
            let byte = data[place];
            for changed in [0, 0xff, byte ^ 1] {
                data[place] = changed;
                if let Ok(image) = decode(&data, &limits) {
                    let num_pixels = image.height() * image.width();
                    assert!(num_pixels <= limits.max_image_pixels, "{name} at {place}");
                    assert_eq!(image.values().len(), num_pixels * 3, "{name} at {place}");
                }
            }
            data[place] = byte;
        }
    }
}

#[test]
fn limits_are_checked_before_anything_is_decoded() {
    for (name, data) in images() {
        let image = decode(&data, &ImageLimits::default()).expect("the file is read");
        let num_pixels = image.height() * image.width();
        let limits = |max_image_bytes, max_image_pixels| ImageLimits {
            max_image_bytes,
            max_image_pixels,
        };
        assert!(
            decode(&data, &limits(data.len(), num_pixels)).is_ok(),
            "{name}"
        );
        let few_bytes = decode(&data, &limits(data.len() - 1, num_pixels));
        assert!(
            matches!(few_bytes, Err(ImageError::Bytes { .. })),
            "{name}: {few_bytes:?}"
        );
        let few_pixels = decode(&data, &limits(data.len(), num_pixels - 1));
        assert!(
            matches!(few_pixels, Err(ImageError::Size { .. })),
            "{name}: {few_pixels:?}"
        );
    }
}

#[test]
fn what_is_no_image_is_refused_by_its_first_bytes() {
    for (data, start) in [
        (&b""[..], "starts with ;"),
        (b"%PDF-1.7\nand more", "255044462d312e37;"),
    ] {
        let error = decode(data, &ImageLimits::default())
            .expect_err("no image")
            .to_string();
        assert!(error.contains(start), "{error}");
    }
}
