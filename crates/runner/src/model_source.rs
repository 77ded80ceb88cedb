//! What a runner is loaded from: a checkpoint, and the model that it describes.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::Value;

use super::adapter_parts::AdapterParts;
use super::draft_head::HeadSource;
use super::families;
use super::model_tensors::ModelTensors;
use super::precision::WeightPrecision;
use super::share::CutUnits;
use super::spec::{ClassHead, ClassModules, LayerSpec, ModelSpec, Module, Pooling, TowerSpec};
use super::stage::ModelPart;
use super::tower::TowerSource;
use super::weight_cache::WeightCache;
use super::weight_sources::WeightSources;
use inflight_base::{LoadError, TokenId};
use inflight_checkpoint::{Checkpoint, EmbeddingModules, JsonFile, max_text_tokens};
use inflight_collective::Grid;
use inflight_config::PoolingMode;
use inflight_device::{AdapterWeights, Device, QuantisedWidths, Tiling};
use inflight_device_cpu::Cpu;

/// A model before its weights are read: its description, its end tokens, and the checkpoint that holds its weights.
///
/// Kept as long as instances may be added, each of which reads the weights again.
pub struct ModelSource {
    checkpoint: Arc<Checkpoint>,
    spec: ModelSpec,
    end_ids: Vec<TokenId>,
    draft_model: Option<Box<ModelSource>>,
    draft_head: Option<Box<HeadSource>>,
    tower: Option<Box<TowerSpec>>,
    max_text_tokens: Option<usize>,
    weight_cache: Option<WeightCacheFile>,
    /// How ranks may cut its weights, once that is known.
    cut_units: OnceLock<CutUnits>,
}

/// Where rounded weights are kept, and the mode of that file.
struct WeightCacheFile {
    path: PathBuf,
    mode: u32,
}

impl ModelSource {
    /// Opens a checkpoint folder. The shapes of tensors are checked when they are read.
    ///
    /// # Errors
    /// A file is missing or damaged, or describes a model that is not supported.
    pub fn open(dir: &Path) -> Result<Self, LoadError> {
        let checkpoint = Checkpoint::open(dir)?;
        let (spec, end_ids) = match checkpoint.gguf() {
            Some(_) => describe_gguf(&checkpoint)?,
            None => describe_safetensors(&checkpoint)?,
        };
        Self::described(checkpoint, spec, end_ids)
    }

    /// Opens a checkpoint folder as a model that embeds, without its output layer. `pooling` and `normalize` take the
    /// place of what the folder says; without a modules.json it is the normalised state of the last token of a decoder,
    /// and the normalised mean of an encoder's states.
    ///
    /// # Errors
    /// As [`ModelSource::open`], or the folder's modules.json has something that is not computed.
    pub fn open_embedder(
        dir: &Path,
        pooling: Option<PoolingMode>,
        normalize: Option<bool>,
    ) -> Result<Self, LoadError> {
        let checkpoint = Checkpoint::open(dir)?;
        let mut spec = match (checkpoint.gguf(), checkpoint.config()) {
            (None, Some(config)) => families::describe_embedder(config)?,
            _ => describe_gguf(&checkpoint)?.0,
        };
        let modules = match (pooling, normalize) {
            (Some(_), Some(_)) => None,
            _ => EmbeddingModules::read(dir)?,
        };
        let usual = match spec.is_bidirectional {
            true => PoolingMode::Mean,
            false => PoolingMode::Last,
        };
        spec.pooling = Some(Pooling {
            mode: pooling.unwrap_or(modules.map_or(usual, |it| it.pooling)),
            normalize: normalize.unwrap_or(modules.is_none_or(|it| it.normalize)),
        });
        let max_text_tokens = max_text_tokens(dir)?;
        let max_text_tokens = max_text_tokens.map(|max| max.min(spec.max_seq_len()));
        Ok(Self {
            max_text_tokens,
            ..Self::described(checkpoint, spec, Vec::new())?
        })
    }

    /// Opens a checkpoint folder as a model that sorts prompts into classes: a `...ForSequenceClassification` of
    /// transformers. `pooling` takes the place of what its family does.
    ///
    /// # Errors
    /// As [`ModelSource::open`], or it has no classes.
    pub fn open_classifier(dir: &Path, pooling: Option<PoolingMode>) -> Result<Self, LoadError> {
        Self::open_with_classes(dir, pooling, ClassHead::classifying)
    }

    /// Opens a checkpoint folder as a model that gives a prompt a number: one with a single class.
    ///
    /// # Errors
    /// As [`ModelSource::open_classifier`], or it has several classes.
    pub fn open_scorer(dir: &Path, pooling: Option<PoolingMode>) -> Result<Self, LoadError> {
        Self::open_with_classes(dir, pooling, ClassHead::scoring)
    }

    /// Opens a checkpoint folder of a model that generates as one that gives a prompt a number: how likely the second
    /// of two tokens follows it, rather than the first.
    ///
    /// # Errors
    /// As [`ModelSource::open`], or a token is none of the model's.
    pub fn open_token_scorer(
        dir: &Path,
        pooling: Option<PoolingMode>,
        tokens: [TokenId; 2],
    ) -> Result<Self, LoadError> {
        let gguf = "classifier_from_token is not for GGUF files";
        Self::open_with_head(dir, pooling, gguf, |config| {
            let spec = families::describe(config)?;
            let head = ClassHead::of_tokens(&spec, tokens)?;
            Ok((spec, head))
        })
    }

    fn open_with_classes(
        dir: &Path,
        pooling: Option<PoolingMode>,
        head: impl FnOnce(ClassModules, &JsonFile) -> Result<ClassHead, LoadError>,
    ) -> Result<Self, LoadError> {
        Self::open_with_head(dir, pooling, "GGUF files have no classes", |config| {
            let (spec, modules) = families::describe_classifier(config)?;
            Ok((spec, head(modules, config)?))
        })
    }

    /// `gguf` is what is wrong with GGUF files.
    fn open_with_head(
        dir: &Path,
        pooling: Option<PoolingMode>,
        gguf: &str,
        describe: impl FnOnce(&JsonFile) -> Result<(ModelSpec, ClassHead), LoadError>,
    ) -> Result<Self, LoadError> {
        let checkpoint = Checkpoint::open(dir)?;
        let (None, Some(config)) = (checkpoint.gguf(), checkpoint.config()) else {
            return Err(LoadError::File {
                path: dir.to_owned(),
                reason: format!("{gguf}: serve the checkpoint of safetensors"),
            });
        };
        let (mut spec, head) = describe(config)?;
        spec.pooling = Some(Pooling {
            mode: pooling.unwrap_or(head.modules.pooling),
            normalize: false,
        });
        spec.classes = Some(head);
        Self::described(checkpoint, spec, Vec::new())
    }

    fn described(
        checkpoint: Checkpoint,
        spec: ModelSpec,
        end_ids: Vec<TokenId>,
    ) -> Result<Self, LoadError> {
        // An unsupported quantisation is reported here, and not when the weights are read.
        checkpoint.store()?;
        Ok(Self {
            checkpoint: Arc::new(checkpoint),
            spec,
            end_ids,
            weight_cache: None,
            draft_model: None,
            draft_head: None,
            tower: None,
            max_text_tokens: None,
            cut_units: OnceLock::new(),
        })
    }

    /// Keeps weights that are rounded at load in the file `path` for the next load. The file is created with `mode`
    /// (and missing folders so that whoever may read it may enter them), and replaced if it is damaged or was made
    /// from anything else. Problems with it are logged and fail no load.
    #[must_use]
    pub fn with_weight_cache(self, path: PathBuf, mode: u32) -> Self {
        Self {
            weight_cache: Some(WeightCacheFile { path, mode }),
            ..self
        }
    }

    /// The same model with a smaller one that makes drafts for it. A runner on a CPU loads both.
    ///
    /// # Errors
    /// It has another number of tokens.
    pub fn with_draft_model(self, draft_model: Self) -> Result<Self, LoadError> {
        let [own, others] = [&self, &draft_model].map(|it| it.spec.vocab_size);
        if own != others {
            return Err(LoadError::Config {
                problem: format!(
                    "the draft model in {} has {others} tokens, and the model in {} has {own}",
                    draft_model.folder().display(),
                    self.folder().display()
                ),
                remedy: "name a draft model with the same tokenizer, or leave it out".to_owned(),
            });
        }
        if draft_model.spec.recurrence().is_some() {
            return Err(LoadError::Config {
                problem: format!(
                    "the draft model in {} has layers with recurrent states, which drafts that are rejected would change",
                    draft_model.folder().display()
                ),
                remedy: "name a draft model whose layers all have attention, or leave it out"
                    .to_owned(),
            });
        }
        Ok(Self {
            draft_model: Some(Box::new(draft_model)),
            ..self
        })
    }

    /// The same model with an EAGLE-3 head, in the folder `dir`, that makes drafts for it. A runner on a CPU loads
    /// both.
    ///
    /// # Errors
    /// A file is missing or damaged, or describes no head for this model, or one that is not supported.
    pub fn with_draft_head(self, dir: &Path) -> Result<Self, LoadError> {
        let head = HeadSource::open_eagle(dir, &self.spec)?;
        Ok(Self {
            draft_head: Some(Box::new(head)),
            ..self
        })
    }

    /// This model with the head for multi-token prediction of its checkpoint, which makes drafts for it. A runner
    /// on a CPU loads both.
    ///
    /// # Errors
    /// The family is not known to have such heads, or the checkpoint has none.
    pub fn with_mtp_head(self) -> Result<Self, LoadError> {
        let head = HeadSource::find_mtp(&self.checkpoint, &self.spec)?;
        Ok(Self {
            draft_head: Some(Box::new(head)),
            ..self
        })
    }

    /// Whether models of its family have a vision tower that is supported.
    pub fn has_known_tower(&self) -> bool {
        families::has_tower(&self.spec)
    }

    /// Looks for the vision tower of its checkpoint.
    ///
    /// # Errors
    /// The family has no tower that is supported, or a tensor is missing, or has the wrong shape or type.
    pub fn find_tower(&self) -> Result<TowerSpec, LoadError> {
        let Some(config) = self.checkpoint.config() else {
            return Err(LoadError::File {
                path: self.folder().to_owned(),
                reason: "vision towers are not read from GGUF files: serve the checkpoint of safetensors".to_owned(),
            });
        };
        let tower = families::describe_tower(config, &self.spec)?;
        TowerSource::find(&tower, self.checkpoint.store()?)?;
        Ok(tower)
    }

    /// This model with the vision tower that [`ModelSource::find_tower`] has found, so that prompts may have images.
    /// Without that it is served for text only.
    pub fn with_tower(mut self, tower: TowerSpec) -> Self {
        for layer in &mut self.spec.layers {
            layer.attention.rope.axes = tower.text_axes;
        }
        Self {
            tower: Some(Box::new(tower)),
            ..self
        }
    }

    /// This model with the vision tower of its checkpoint.
    ///
    /// # Errors
    /// [`ModelSource::find_tower`] has found none.
    pub fn with_images(self) -> Result<Self, LoadError> {
        let tower = self.find_tower()?;
        Ok(self.with_tower(tower))
    }

    /// Its vision tower, if prompts may have images.
    pub fn tower(&self) -> Option<&TowerSpec> {
        self.tower.as_deref()
    }

    /// The weights of its vision tower.
    pub(super) fn tower_source(&self) -> Result<Option<TowerSource<'_>>, LoadError> {
        match self.tower() {
            Some(tower) => TowerSource::find(tower, self.checkpoint.store()?).map(Some),
            None => Ok(None),
        }
    }

    /// Its draft head.
    pub fn draft_head(&self) -> Option<&HeadSource> {
        self.draft_head.as_deref()
    }

    /// The model that makes drafts for it.
    pub fn draft_model(&self) -> Option<&Self> {
        self.draft_model.as_deref()
    }

    /// The most positions of a sequence, of its draft model as well.
    pub fn max_positions(&self) -> u32 {
        let models = [Some(self), self.draft_model()].into_iter().flatten();
        let positions = models.map(|it| it.spec.max_seq_len()).min();
        u32::try_from(positions.unwrap_or(0)).unwrap_or(u32::MAX)
    }

    /// The tokens after which sentence-transformers cuts a text, special ones included, if the folder is one of its
    /// models.
    pub fn max_text_tokens(&self) -> Option<usize> {
        self.max_text_tokens
    }

    /// The checkpoint folder.
    pub fn folder(&self) -> &Path {
        self.checkpoint.dir()
    }

    /// What the model computes.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The tokens that end a text: `eos_token_id` of generation_config.json, else of config.json, else of a GGUF
    /// file's metadata. Empty if none of them has it.
    pub fn end_ids(&self) -> &[TokenId] {
        &self.end_ids
    }

    /// generation_config.json, if the checkpoint has one.
    pub fn generation_config(&self) -> Option<&JsonFile> {
        self.checkpoint.generation_config()
    }

    /// Bytes of the weights in memory, without padding, if float weights are rounded to `precision`. FP8 weights count
    /// as bf16, which they are on a CPU; [`ModelRunner::num_weight_bytes`](super::ModelRunner::num_weight_bytes) knows
    /// the device.
    ///
    /// # Errors
    /// A tensor is missing, or has the wrong shape or type.
    pub fn num_weight_bytes(&self, precision: Option<WeightPrecision>) -> Result<u64, LoadError> {
        self.num_weight_bytes_in(precision, 1)
    }

    /// Bytes of the weights on all ranks of a pipeline, and of the draft model or head. The first and the last stage
    /// each have tied embeddings.
    ///
    /// # Errors
    /// As [`ModelSource::num_weight_bytes`].
    pub fn num_weight_bytes_in(
        &self,
        precision: Option<WeightPrecision>,
        num_stages: usize,
    ) -> Result<u64, LoadError> {
        let sources = WeightSources::find(&self.tensors()?, &self.spec)?;
        let of_draft_model = match self.draft_model() {
            Some(draft_model) => draft_model.num_weight_bytes(precision)?,
            None => 0,
        };
        let of_head = match self.draft_head() {
            Some(head) => head.num_weight_bytes(precision)?,
            None => 0,
        };
        let of_tower = match self.tower_source()? {
            Some(tower) => tower.num_bytes::<Cpu>(),
            None => 0,
        };
        let own = sources.num_bytes::<Cpu>(precision, num_stages);
        Ok(own + of_draft_model + of_head + of_tower)
    }

    /// The same in one stage, on another device.
    pub(super) fn num_weight_bytes_on<D: Device>(
        &self,
        precision: Option<WeightPrecision>,
    ) -> Result<u64, LoadError> {
        let sources = WeightSources::find(&self.tensors()?, &self.spec)?;
        Ok(sources.num_bytes::<D>(precision, 1))
    }

    /// The products with quantised weights, if float weights are rounded to `precision`.
    ///
    /// # Errors
    /// As [`ModelSource::num_weight_bytes`].
    pub(super) fn quantised_widths<D: Device>(
        &self,
        precision: Option<WeightPrecision>,
    ) -> Result<QuantisedWidths, LoadError> {
        let sources = WeightSources::find(&self.tensors()?, &self.spec)?;
        Ok(sources.quantised_widths::<D>(precision))
    }

    /// Refuses ranks that it cannot be split over, whose devices cut sums into tiles or not.
    ///
    /// # Errors
    /// It cannot be split so, or a tensor is missing, or has the wrong shape or type.
    pub fn check_ranks(&self, grid: Grid, tiling: Tiling) -> Result<(), LoadError> {
        self.part(grid, 0, tiling).map(|_| ())
    }

    /// The part of one of the ranks that it is split over, whose devices cut sums into tiles or not. A pooling model
    /// has no ranks whose bits it could give.
    ///
    /// # Errors
    /// It cannot be split so, or a tensor is missing, or has the wrong shape or type.
    pub(super) fn part(
        &self,
        grid: Grid,
        rank: usize,
        tiling: Tiling,
    ) -> Result<ModelPart, LoadError> {
        let always = tiling == Tiling::Always && self.spec.pooling.is_none();
        let parts = self.spec.parts_for_layer_input_ops();
        if !parts.is_empty() && (grid.num_ranks() > 1 || always) {
            return Err(LoadError::Config {
                problem: format!(
                    "{} has {}, which are computed by one process and whose sums are not cut",
                    self.spec.family,
                    parts.join(", ")
                ),
                remedy: "leave out tensor_parallel_size, pipeline_parallel_size and deterministic"
                    .to_owned(),
            });
        }
        let mut layers = self.spec.layers.iter();
        if grid.num_stages > 1 && layers.any(LayerSpec::shares_selection) {
            return Err(LoadError::Config {
                problem: format!(
                    "{} has layers that share the selection of a layer before them, which is computed by one stage",
                    self.spec.family
                ),
                remedy: "leave out pipeline_parallel_size".to_owned(),
            });
        }
        let units = match grid.ranks_per_stage > 1 || always {
            true => Some(self.cut_units()?),
            false => None,
        };
        let mut part = ModelPart::of_rank(grid, rank, &self.spec, units)?;
        if tiling == Tiling::Never
            && let Some(share) = &mut part.share
        {
            *share = share.without_tiles(&self.spec)?;
        }
        Ok(part)
    }

    fn cut_units(&self) -> Result<CutUnits, LoadError> {
        if let Some(units) = self.cut_units.get() {
            return Ok(*units);
        }
        let sources = WeightSources::find(&self.tensors()?, &self.spec)?;
        Ok(*self.cut_units.get_or_init(|| sources.cut_units(&self.spec)))
    }

    /// The sizes of its parts on each rank.
    ///
    /// # Errors
    /// It cannot be split so, or a tensor is missing, or has the wrong shape or type.
    pub fn specs_of_ranks(&self, grid: impl Into<Grid>) -> Result<Vec<ModelSpec>, LoadError> {
        let grid = grid.into();
        let parts = (0..grid.num_ranks()).map(|rank| self.part(grid, rank, Tiling::OfRanks));
        parts
            .map(|part| Ok(part?.local_spec_of_stage(&self.spec)))
            .collect()
    }

    /// The layers of each stage.
    ///
    /// # Errors
    /// As [`ModelSource::specs_of_ranks`].
    pub fn layers_of_stages(&self, grid: impl Into<Grid>) -> Result<Vec<Range<usize>>, LoadError> {
        let grid = grid.into();
        let firsts = (0..grid.num_stages).map(|stage| stage * grid.ranks_per_stage);
        let parts = firsts.map(|rank| self.part(grid, rank, Tiling::OfRanks));
        parts.map(|part| Ok(part?.stage.layers)).collect()
    }

    /// What ranks have of an adapter that was loaded for this model, whose devices cut sums into tiles or not.
    ///
    /// # Errors
    /// As [`ModelSource::specs_of_ranks`], or there is not enough memory.
    pub fn adapter_parts(
        &self,
        weights: AdapterWeights,
        grid: impl Into<Grid>,
        tiling: Tiling,
    ) -> Result<AdapterParts, LoadError> {
        let grid = grid.into();
        let parts = (0..grid.num_ranks()).map(|rank| self.part(grid, rank, tiling));
        let parts: Vec<_> = parts.collect::<Result<_, _>>()?;
        match &parts[..] {
            [whole] if whole.is_whole() => Ok(weights.into()),
            parts => AdapterParts::new(&weights, parts, &self.spec),
        }
    }

    /// What one of several ranks has of an adapter, for requests that each rank is given itself, see
    /// [`ModelRunner::of_rank`](super::ModelRunner::of_rank).
    ///
    /// # Errors
    /// As [`ModelSource::adapter_parts`].
    pub fn adapter_of_rank(
        &self,
        weights: &AdapterWeights,
        grid: impl Into<Grid>,
        rank: usize,
        tiling: Tiling,
    ) -> Result<AdapterParts, LoadError> {
        let part = self.part(grid.into(), rank, tiling)?;
        AdapterParts::new(weights, &[part], &self.spec)
    }

    /// The files that it was opened from: name, size and time of change of each.
    pub fn stamps(&self) -> String {
        let stamps = self.checkpoint.stamps().map(ToString::to_string);
        stamps.collect::<Vec<_>>().join("\n")
    }

    /// The weights by name.
    pub(super) fn tensors(&self) -> Result<ModelTensors<'_>, LoadError> {
        let gguf = self.checkpoint.gguf().map(families::gguf_architecture);
        let store = self.checkpoint.store()?;
        Ok(ModelTensors::new(&self.spec, store, gguf.transpose()?))
    }

    /// The weights that an earlier load has rounded to `precision`; `None` if none are kept.
    pub(super) fn open_weight_cache<D: Device>(
        &self,
        precision: Option<WeightPrecision>,
        device: &D,
    ) -> Option<WeightCache> {
        let WeightCacheFile { path, mode } = self.weight_cache.as_ref()?;
        let stamps = self.checkpoint.stamps();
        WeightCache::open(path, *mode, precision, stamps, device)
    }
}

fn describe_safetensors(checkpoint: &Checkpoint) -> Result<(ModelSpec, Vec<TokenId>), LoadError> {
    let config = checkpoint.config().expect("a folder of safetensors has it");
    let mut spec = families::describe(config)?;
    let end_ids = end_ids(checkpoint, config, spec.vocab_size)?;
    let modules = [spec.modules.embedding, spec.modules.output_layer];
    let [embedding, output] = {
        let tensors = ModelTensors::new(&spec, checkpoint.store()?, None);
        modules.map(|module| format!("{}.weight", tensors.stored_name(Module::of_model(module))))
    };
    if spec.tied_embeddings && !checkpoint.are_equal(&embedding, &output)? {
        log::warn!(
            "{}: tie_word_embeddings is true, but the checkpoint has an {output} that differs from {embedding}: \
             {output} is used, as in transformers 5; write tie_word_embeddings: false, or remove {output} from the \
             checkpoint",
            checkpoint.dir().join("config.json").display()
        );
        spec.tied_embeddings = false;
    }
    Ok((spec, end_ids))
}

/// config.json describes the model if there is one, and else the metadata of the files.
fn describe_gguf(checkpoint: &Checkpoint) -> Result<(ModelSpec, Vec<TokenId>), LoadError> {
    let gguf = checkpoint.gguf().expect("the caller has found GGUF files");
    let from_metadata;
    let (config, mut spec) = match checkpoint.config() {
        Some(config) => (config, families::describe(config)?),
        None => {
            let (config, spec) = families::describe_gguf(gguf)?;
            from_metadata = config;
            (&from_metadata, spec)
        }
    };
    let architecture = families::gguf_architecture(gguf)?;
    let output_layer = Module::of_model(spec.modules.output_layer);
    spec.tied_embeddings = !architecture.has_parameter(gguf, output_layer, "weight");
    architecture.convert(gguf, &mut spec)?;
    let mut end_ids = end_ids(checkpoint, config, spec.vocab_size)?;
    if end_ids.is_empty() {
        end_ids = gguf.end_tokens()?;
        end_ids.retain(|&id| (id as usize) < spec.vocab_size);
    }
    Ok((spec, end_ids))
}

fn end_ids(
    checkpoint: &Checkpoint,
    config: &JsonFile,
    vocab_size: usize,
) -> Result<Vec<TokenId>, LoadError> {
    const KEY: &str = "eos_token_id";
    let Some((file, value)) = [checkpoint.generation_config(), Some(config)]
        .into_iter()
        .flatten()
        .find_map(|file| Some((file, file.get(KEY)?)))
    else {
        return Ok(Vec::new());
    };
    let ids = match value {
        Value::Array(ids) => ids.as_slice(),
        one => std::slice::from_ref(one),
    };
    let mut known = Vec::new();
    for id in ids {
        match id.as_i64() {
            // Some checkpoints name tokens of the tokenizer that they were derived from, which they cannot generate.
            Some(outside) if !(0..vocab_size as i64).contains(&outside) => log::warn!(
                "{}: {KEY}: {outside} is not below vocab_size {vocab_size}, so it ends nothing",
                file.path().display()
            ),
            Some(id) => known.push(id as TokenId),
            None => {
                let expected = "a token id, or a list of them";
                return Err(file.unexpected(KEY, value, expected));
            }
        }
    }
    Ok(known)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};
    use std::fs;
    use std::path::Path;

    use safetensors::SafeTensors;

    use super::ModelSource;
    use crate::spec::Module;
    use inflight_checkpoint::Matrix;

    /// Fixtures with groups of 16, which are rounded to groups of 32.
    const ROUNDED: [&str; 4] = [
        "awq-group-16",
        "compressed-fp4",
        "compressed-group-16",
        "modelopt-mixed",
    ];

    /// Rows of every matrix of every quantised fixture, as their formats' own tools dequantise them: see
    /// tests/fixtures/make_quantised_fixtures.py.
    #[test]
    fn weights_are_what_the_formats_own_tools_make_of_them() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/quantised");
        let mut num_checkpoints = 0;
        for entry in fs::read_dir(dir).expect("the fixtures") {
            let folder = entry.expect("the fixtures").path();
            if folder.is_dir() {
                num_checkpoints += 1;
                agrees(&folder);
            }
        }
        assert_eq!(num_checkpoints, 23);
    }

    fn agrees(folder: &Path) {
        let source = ModelSource::open(folder).expect("the checkpoint opens");
        let bytes = fs::read(folder.with_extension("safetensors")).expect("its rows");
        let expected = SafeTensors::deserialize(&bytes).expect("whole");
        let spec = source.spec();
        let tensors = source.tensors().expect("a known quantisation");
        let (vocab, hidden) = (spec.vocab_size, spec.hidden_size);
        let outside = [spec.modules.embedding, spec.modules.output_layer];
        let outside = outside.map(|name| (Module::of_model(name), vocab, hidden));
        let layers = spec.layers.iter().enumerate();
        let inside = layers.flat_map(|(index, layer)| {
            layer.projections().flat_map(move |projection| {
                projection.parts.iter().map(move |part| {
                    let module = Module::of_layer(index, part.module);
                    (module, part.num_outputs, projection.num_inputs)
                })
            })
        });
        let modules: HashMap<String, _> = outside
            .into_iter()
            .chain(inside)
            .map(|module| (spec.module_path(module.0), module))
            .collect();
        let is_rounded = ROUNDED.iter().any(|name| folder.ends_with(name));
        let mut seen = BTreeSet::new();
        for (module, rows) in expected.tensors() {
            let (stored, outputs, inputs) = modules[&module];
            seen.insert(stored.name);
            let matrix = tensors.matrix(stored, outputs, inputs);
            let matrix = matrix.expect("the matrix is there");
            matrix.preload().expect("it is read");
            assert_eq!((matrix.rows(), matrix.columns()), (outputs, inputs));
            parts_agree(&matrix);
            let stride = (outputs / 8).max(1) | 1;
            let mut row = vec![0.0; inputs];
            let (values, _) = rows.data().as_chunks();
            let chunks = values.chunks_exact(inputs);
            assert_eq!(chunks.len(), outputs.div_ceil(stride), "{module}");
            for (index, expected) in chunks.enumerate() {
                let index = index * stride;
                matrix.read_row(index, &mut row);
                let largest = row
                    .iter()
                    .fold(0.0, |largest: f32, it| largest.max(it.abs()));
                // Half of a step.
                let tolerance = match is_rounded && matrix.is_quantised() {
                    true => largest / 127.0,
                    false => 1e-6,
                };
                for (column, (got, expected)) in row.iter().zip(expected).enumerate() {
                    let expected = f32::from_le_bytes(*expected);
                    // Of a scale times a code plus an offset, in one order or another.
                    assert!(
                        (got - expected).abs() <= tolerance,
                        "{}: {module}, row {index}, column {column}: {got} is not {expected}",
                        folder.display()
                    );
                }
            }
        }
        assert!(seen.len() >= 8, "{seen:?}");
    }

    /// A part, and a part of a part, have the weights of the whole.
    fn parts_agree(whole: &Matrix<'_>) {
        let (rows, columns, group) = (whole.rows(), whole.columns(), whole.columns_of_group());
        let all = 0..columns;
        let (mut row, mut row_of_part) = (vec![0.0; columns], Vec::new());
        for (rows, columns) in [
            (3..rows, all.clone()),
            (0..rows, columns / group / 2 * group..columns),
            (
                rows / 2 + 1..rows - 2,
                0..columns.div_ceil(2 * group) * group,
            ),
        ] {
            let part = whole.part(rows.clone(), columns.clone());
            let inner = match columns.len() > group && part.columns_of_group() == group {
                true => group..columns.len(),
                false => 0..columns.len(),
            };
            let part_of_part = part.part(1..rows.len(), inner.clone());
            for (part, first, columns) in [
                (&part, rows.start, columns.clone()),
                (
                    &part_of_part,
                    rows.start + 1,
                    columns.start + inner.start..columns.end,
                ),
            ] {
                part.preload().expect("it is read");
                assert_eq!(
                    (first + part.rows(), part.columns()),
                    (rows.end, columns.len())
                );
                row_of_part.resize(columns.len(), 0.0);
                for index in 0..part.rows() {
                    whole.read_row(first + index, &mut row);
                    part.read_row(index, &mut row_of_part);
                    assert_eq!(
                        row[columns.clone()],
                        row_of_part,
                        "{}",
                        part.location().name
                    );
                }
            }
        }
    }
}
