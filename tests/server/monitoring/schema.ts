// What Grafana takes of a dashboard, in its own types, for the panels and queries that ours has. Grafana's type of a dashboard
// leaves open what is in the options, fields and queries of a panel; here they are those of the kind of panel.

import type { Dashboard, DataQuery, FieldConfig, GraphFieldConfig, Panel, RowPanel } from "@grafana/schema";
import type { Options } from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

// A type as JSON has it, where a name of an enumeration is a text.
type Json<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Json<T[K]> } : T;

interface Chart extends Omit<Panel, "type" | "options" | "fieldConfig" | "targets"> {
  type: "timeseries";
  options: Options;
  fieldConfig: { defaults: Omit<FieldConfig, "custom"> & { custom: GraphFieldConfig }; overrides: [] };
  targets: Query[];
}

// A query to a data source of type Prometheus, whose types Grafana does not publish.
interface Query extends DataQuery {
  expr: string;
  legendFormat: string;
}

interface Row extends Omit<RowPanel, "panels"> {
  panels: [];
}

export type Document = Json<Omit<Dashboard, "panels"> & { panels: (Chart | Row)[] }>;
