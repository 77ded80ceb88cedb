//! The instruction sets of the kernels.

use std::fmt;
use std::str::FromStr;

/// An instruction set that there are kernels for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Simd {
    /// AVX-512 as below, and AMX for products of bf16 (`tdpbf16ps`).
    AmxBf16,
    /// AVX-512 with the dot products of bf16 (`vdpbf16ps`) and of 8-bit integers (VNNI).
    Avx512Bf16,
    /// AVX2 with FMA and F16C; bf16 is widened to f32.
    Avx2,
    /// Plain Rust, for any machine.
    Portable,
}

impl Simd {
    /// All of them, fastest first.
    pub const ALL: [Self; 4] = [Self::AmxBf16, Self::Avx512Bf16, Self::Avx2, Self::Portable];

    /// The fastest one that this machine supports.
    pub fn detect() -> Self {
        Self::ALL
            .into_iter()
            .find(|simd| simd.is_supported())
            .unwrap_or(Self::Portable)
    }

    /// Whether this machine has it, and lets this process use it.
    pub fn is_supported(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::AmxBf16 => Self::Avx512Bf16.is_supported() && super::amx::is_usable(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512bf16")
                    && is_x86_feature_detected!("avx512vnni")
                    && Self::Avx2.is_supported()
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::AmxBf16 | Self::Avx512Bf16 | Self::Avx2 => false,
            Self::Portable => true,
        }
    }

    /// Whether it multiplies and adds in one instruction.
    pub(super) const fn fuses(self) -> bool {
        !matches!(self, Self::Portable)
    }

    /// Its name in a configuration.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AmxBf16 => "amx_bf16",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        }
    }
}

impl fmt::Display for Simd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Simd {
    type Err = String;

    /// # Errors
    ///
    /// Lists the known names.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|simd| simd.as_str() == name)
            .ok_or_else(|| {
                let names: Vec<_> = Self::ALL.iter().map(|simd| simd.as_str()).collect();
                format!("one of {}", names.join(", "))
            })
    }
}

/// Compiles a plain Rust function once per instruction set, and calls the version for the one in use. The
/// function must be `#[inline(always)]`, so that its loops are compiled to vector code of that set.
macro_rules! for_each_simd {
    ($simd:expr, $function:path, ($($arg:ident: $type:ty),* $(,)?)) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        fn avx512($($arg: $type),*) {
            $function($($arg),*)
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn avx2($($arg: $type),*) {
            $function($($arg),*)
        }
        match $simd {
            // SAFETY: a `Cpu` is created only with an instruction set that the machine supports.
            #[cfg(target_arch = "x86_64")]
            $crate::Simd::AmxBf16 | $crate::Simd::Avx512Bf16 => unsafe { avx512($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            $crate::Simd::Avx2 => unsafe { avx2($($arg),*) },
            _ => $function($($arg),*),
        }
    }};
}
pub(super) use for_each_simd;

#[cfg(test)]
#[path = "../../../tests/support/missing.rs"]
mod missing;

#[cfg(test)]
impl Simd {
    /// The sets that this machine supports. The running test is reported to skip the others.
    pub fn tested() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|simd| simd.is_tested())
    }

    /// Whether this machine supports it. If not, the running test is reported to skip it.
    pub fn is_tested(self) -> bool {
        missing::present_or_reported(&self, self.is_supported())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for simd in Simd::ALL {
            assert_eq!(simd.as_str().parse(), Ok(simd));
        }
        assert!("sse9".parse::<Simd>().is_err_and(|e| e.contains("avx2")));
    }

    /// The kernel's list of what the processor has, in its own names. It has `amx_bf16` where a process may not use it.
    #[test]
    #[cfg(target_os = "linux")]
    fn the_detected_set_is_the_fastest_of_the_processors_flags() {
        const AVX2: &[&str] = &["avx2", "fma", "f16c"];
        const AVX512: &[&str] = &[
            "avx512f",
            "avx512bw",
            "avx512dq",
            "avx512vl",
            "avx512_bf16",
            "avx512_vnni",
        ];
        let text = std::fs::read_to_string("/proc/cpuinfo").expect("Linux has it");
        let line = text.lines().find_map(|line| line.strip_prefix("flags"));
        let flags: Vec<_> = line.unwrap_or_default().split_whitespace().collect();
        let has = |names: &[&str]| names.iter().all(|name| flags.contains(name));
        let expected = match (has(AVX2), has(AVX2) && has(AVX512)) {
            (_, true) if has(&["amx_tile", "amx_bf16"]) && crate::amx::is_usable() => Simd::AmxBf16,
            (_, true) => Simd::Avx512Bf16,
            (true, false) => Simd::Avx2,
            (false, false) => Simd::Portable,
        };
        assert_eq!(Simd::detect(), expected, "{flags:?}");
    }
}
